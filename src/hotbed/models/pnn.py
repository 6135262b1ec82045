"""Product-based neural networks: products of vectors beside the vectors, and an MLP over both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from hotbed.errors import TableError
from hotbed.models.click import ClickModel
from hotbed.models.registry import register
from hotbed.models.settings import ModelSettings
from hotbed.nn import MLP
from hotbed.nn.factorization import stacked

__all__ = ["PNN", "PNNSettings"]


@dataclasses.dataclass(frozen=True)
class PNNSettings(ModelSettings):
    """Settings of `PNN`."""

    hidden: tuple[int, ...] = (256, 128)
    """Widths of the MLP's hidden layers."""
    dropout: float = 0.0
    """Share of the hidden values set to zero while training."""
    product: str = "inner"
    """"inner" or "outer"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.product not in ("inner", "outer"):
            raise TableError(f"PNN: product is {self.product!r}. Pass 'inner' or 'outer'.")


@register("pnn")
class PNN(ClickModel):
    """Product-based neural network (Qu et al., arXiv:1611.00144); arguments as of `ClickModel`.

    An MLP sees the dense columns, the vectors and their products side by side: the inner products of all
    pairs, or the outer product of the sum of the vectors with itself, d × d numbers (section III.C).
    """

    Settings = PNNSettings
    settings: PNNSettings

    def make_layers(self) -> None:
        settings, count = self.settings, len(self.features)
        self.product = settings.product
        products = count * (count - 1) // 2 if self.product == "inner" else self.dim**2
        self.deep = MLP(self.width + products, [*settings.hidden, 1], dropout=settings.dropout)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, _ = self.look_up(batch)
        every = stacked("PNN", vectors)
        if self.product == "inner":
            count = len(vectors)
            rows, columns = torch.tril_indices(count, count, -1, device=every.device).unbind(0)
            products = torch.bmm(every, every.transpose(1, 2))[:, rows, columns]
        else:
            total = every.sum(1)
            products = (total.unsqueeze(2) * total.unsqueeze(1)).flatten(1)
        x = torch.cat([self.side_by_side(batch, vectors), products], 1)
        logits: Tensor = self.deep(x).squeeze(1)
        return logits
