"""AutoInt: attention among the vectors of a sample's features.

Shapes: B samples, F features, n dense columns, d columns of a vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hotbed.errors import TableError
from hotbed.models.click import ClickModel
from hotbed.models.registry import register
from hotbed.models.settings import ModelSettings
from hotbed.nn import MLP, SelfAttentionInteraction
from hotbed.nn.factorization import stacked

__all__ = ["AutoInt", "AutoIntSettings"]


@dataclasses.dataclass(frozen=True)
class AutoIntSettings(ModelSettings):
    """Settings of `AutoInt`."""

    layers: int = 3
    """Layers of attention."""
    heads: int = 2
    """Heads of each layer."""
    head_width: int = 16
    """Columns of a head."""
    hidden: tuple[int, ...] = (256, 128)
    """Widths of the hidden layers of an MLP beside the attention; none: there is no MLP."""
    dropout: float = 0.0
    """Share of the MLP's hidden values set to zero while training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 0:
            raise TableError(f"AutoInt: layers is {self.layers}. Pass 0 or more.")


@register("autoint")
class AutoInt(ClickModel):
    """AutoInt (Song et al., arXiv:1810.11921), with an MLP beside the attention ("AutoInt+").

    Each dense column has a vector too, the column's number times a learned one. Layers of attention over
    all vectors, and a linear layer over the last one's output, give the logits; those of the MLP are added.
    Arguments are those of `ClickModel`.
    """

    Settings = AutoIntSettings
    settings: AutoIntSettings

    def make_layers(self) -> None:
        settings = self.settings
        self.of_dense = nn.Parameter(torch.empty(self.num_dense, self.dim))
        nn.init.normal_(self.of_dense, std=0.01)
        width = settings.heads * settings.head_width
        self.attention = nn.ModuleList(
            SelfAttentionInteraction(
                width if number else self.dim, settings.heads, settings.head_width
            )
            for number in range(settings.layers)
        )
        columns = width if settings.layers else self.dim
        self.top = nn.Linear((self.num_dense + len(self.features)) * columns, 1)
        hidden = settings.hidden
        self.deep = MLP(self.width, [*hidden, 1], dropout=settings.dropout) if hidden else None

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, _ = self.look_up(batch)
        every = stacked("AutoInt", vectors)
        if self.num_dense:
            of_dense = batch["dense"].unsqueeze(2) * self.of_dense
            every = torch.cat([of_dense, every], 1)  # (B, n + F, d)
        for layer in self.attention:
            every = layer(every)
        logits: Tensor = self.top(every.flatten(1))
        if self.deep is not None:
            logits = logits + self.deep(self.side_by_side(batch, vectors))
        return logits.squeeze(1)
