"""FinalMLP: two MLPs that see differently gated features, and their bilinear fusion."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from hotbed.errors import TableError
from hotbed.models.click import ClickModel
from hotbed.models.registry import register
from hotbed.models.settings import ModelSettings
from hotbed.nn import MLP, BilinearFusion, FeatureGate

__all__ = ["FinalMLP", "FinalMLPSettings"]


@dataclasses.dataclass(frozen=True)
class FinalMLPSettings(ModelSettings):
    """Settings of `FinalMLP`."""

    first: tuple[int, ...] = (256, 128)
    """Widths of the first MLP."""
    second: tuple[int, ...] = (256, 128)
    """Widths of the second MLP."""
    dropout: float = 0.0
    """Share of the MLPs' inner values set to zero while training."""
    heads: int = 2
    """Parts into which the fusion divides what the MLPs return."""
    gate: tuple[int, ...] = (64,)
    """Widths of the hidden layers of the gates; none: there are no gates."""
    first_context: tuple[str, ...] = ()
    """Features by which the first gate weighs all; none: a learned vector."""
    second_context: tuple[str, ...] = ()
    """Features by which the second gate weighs all; none: a learned vector."""


@register("final-mlp")
class FinalMLP(ClickModel):
    """FinalMLP (Mao et al., arXiv:2304.00902).

    Two MLPs see the dense columns and the vectors side by side, each through a gate of its own; a bilinear
    fusion of what they return gives the logits. Arguments are those of `ClickModel`.
    """

    Settings = FinalMLPSettings
    settings: FinalMLPSettings

    def make_layers(self) -> None:
        settings = self.settings
        contexts = (settings.first_context, settings.second_context)
        for name in (*contexts[0], *contexts[1]):
            if name not in self.features:
                raise TableError(
                    f"FinalMLP: there is no feature {name!r} for a gate. Name some of "
                    f"{', '.join(self.features)}."
                )
        first, second = (
            FeatureGate(self.width, self.dim * len(context), settings.gate) for context in contexts
        )
        self.gates = torch.nn.ModuleList([first, second] if settings.gate else [])
        self.first, self.second = (
            MLP(self.width, layers, final_activation="relu", dropout=settings.dropout)
            for layers in (settings.first, settings.second)
        )
        self.fusion = BilinearFusion(settings.first[-1], settings.second[-1], settings.heads)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, _ = self.look_up(batch)
        x = y = self.side_by_side(batch, vectors)
        if self.gates:
            named = dict(zip(self.features, vectors, strict=True))
            contexts = (self.settings.first_context, self.settings.second_context)
            x, y = (
                gate(x, torch.cat([named[name] for name in context], 1) if context else None)
                for gate, context in zip(self.gates, contexts, strict=True)
            )
        logits: Tensor = self.fusion(self.first(x), self.second(y)).squeeze(1)
        return logits
