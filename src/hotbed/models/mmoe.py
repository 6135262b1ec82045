"""MMoE: several labels of a sample, from experts that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hotbed.data import Schema
from hotbed.models.click import ClickModel
from hotbed.models.registry import register
from hotbed.models.settings import ModelSettings
from hotbed.nn import MLP, MixtureOfExperts

__all__ = ["MMoE", "MMoESettings"]


@dataclasses.dataclass(frozen=True)
class MMoESettings(ModelSettings):
    """Settings of `MMoE`."""

    tasks: int = 2
    """Labels of a sample."""
    experts: int = 3
    """MLPs that the tasks share."""
    expert: tuple[int, ...] = (256, 128)
    """Widths of an expert's layers, the last one that of its output."""
    tower: tuple[int, ...] = ()
    """Widths of the hidden layers of each task's own MLP; none: it is a linear layer."""


@register("mmoe")
class MMoE(ClickModel):
    """Multi-gate mixture of experts (Ma et al., KDD 2018).

    MLPs, the experts, see the dense columns and the vectors side by side. Each task mixes their outputs by
    a softmax of its own, and a tower of its own makes the logit. ``model(batch)`` returns (B, tasks), or
    (B,) of one task. Arguments are those of `ClickModel`.
    """

    Settings = MMoESettings
    settings: MMoESettings

    @classmethod
    def settings_of(cls, schema: Schema) -> dict[str, object]:
        return {**super().settings_of(schema), "tasks": len(schema.labels)}

    def make_layers(self) -> None:
        settings = self.settings
        self.mixture = MixtureOfExperts(
            self.width, settings.tasks, settings.experts, settings.expert
        )
        self.towers = nn.ModuleList(
            MLP(settings.expert[-1], [*settings.tower, 1]) for _ in range(settings.tasks)
        )

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, _ = self.look_up(batch)
        mixed = self.mixture(self.side_by_side(batch, vectors))
        logits = [tower(x) for tower, x in zip(self.towers, mixed, strict=True)]
        return logits[0].squeeze(1) if len(logits) == 1 else torch.cat(logits, 1)
