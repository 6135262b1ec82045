"""Deep & cross networks, the first and the second."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from hotbed.models.click import ClickModel
from hotbed.models.registry import register
from hotbed.models.settings import ModelSettings
from hotbed.nn import MLP, CrossInteraction

__all__ = ["DCN", "DCNSettings", "DCNv1"]


@dataclasses.dataclass(frozen=True)
class DCNSettings(ModelSettings):
    """Settings of `DCN` and `DCNv1`."""

    hidden: tuple[int, ...] = (256, 128)
    """Widths of the MLP."""
    dropout: float = 0.0
    """Share of the MLP's inner values set to zero while training."""
    layers: int = 3
    """Number of cross layers."""


@register("dcn")
class DCN(ClickModel):
    """Deep & cross network V2 (Wang et al., arXiv:2008.13535), in its parallel form.

    Cross layers and an MLP both see the dense columns and the vectors side by side; a linear layer over the
    outputs of both gives the logits. Arguments are those of `ClickModel`.
    """

    Settings = DCNSettings
    settings: DCNSettings
    form: ClassVar[str] = "matrix"
    """Form of the cross layers; see `hotbed.nn.CrossInteraction`."""

    def make_layers(self) -> None:
        settings, hidden = self.settings, list(self.settings.hidden)
        self.cross = CrossInteraction(self.width, settings.layers, self.form)
        self.deep = MLP(self.width, hidden, final_activation="relu", dropout=settings.dropout)
        self.top = nn.Linear(self.width + hidden[-1], 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, _ = self.look_up(batch)
        x = self.side_by_side(batch, vectors)
        logits: Tensor = self.top(torch.cat([self.cross(x), self.deep(x)], 1)).squeeze(1)
        return logits


@register("dcn-v1")
class DCNv1(DCN):
    """Deep & cross network, the first (Wang et al., arXiv:1708.05123): as `DCN`, with a vector in place of a
    matrix in each cross layer."""

    form = "vector"
