"""Wide & deep: a linear model and a deep one that share their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from hotbed.models.click import ClickModel
from hotbed.models.registry import register
from hotbed.models.settings import LinearSettings
from hotbed.nn import MLP

__all__ = ["WideDeep", "WideDeepSettings"]


@dataclasses.dataclass(frozen=True)
class WideDeepSettings(LinearSettings):
    """Settings of `WideDeep`."""

    hidden: tuple[int, ...] = (256, 128)
    """Widths of the deep part's hidden layers."""
    dropout: float = 0.0
    """Share of the hidden values set to zero while training."""


@register("wide-deep")
class WideDeep(ClickModel):
    """Wide & deep learning (Cheng et al., arXiv:1606.07792); arguments as of `ClickModel`.

    The wide part gives every id a weight of its own (a table of width 1 for each table, from
    zero) and every dense column one; the deep part is an MLP over the embeddings and the dense
    columns side by side. Their sums are the logits.
    """

    Settings = WideDeepSettings
    settings: WideDeepSettings

    def make_layers(self) -> None:
        self.deep = MLP(self.width, [*self.settings.hidden, 1], dropout=self.settings.dropout)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, linear = self.look_up(batch)
        logits: Tensor = (linear + self.deep(self.side_by_side(batch, vectors))).squeeze(1)
        return logits
