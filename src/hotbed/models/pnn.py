"""Product-based neural networks: products of vectors beside the vectors, and an MLP over both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotbed.devices import Device
from hotbed.errors import TableError
from hotbed.models.click import ClickModel
from hotbed.nn import MLP
from hotbed.nn.factorization import stacked
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["PNN"]


class PNN(ClickModel):
    """Product-based neural network (Qu et al., arXiv:1611.00144).

    An MLP sees the dense columns, the vectors and their products side by side: the inner products of all
    pairs, or the outer product of the sum of the vectors with itself, d × d numbers (section III.C).

    Args:
        tables: names of dynamic tables, which start from Normal(0, 0.01), or `Table`s of width
            `dim`. Each is a feature of the batch.
        dim: width of the tables.
        num_dense: columns of ``batch["dense"]``.
        hidden: widths of the MLP's hidden layers.
        dropout: the share of their values set to zero while training.
        product: "inner" or "outer".
        seed: fixes the tables' first values; None draws it from torch's generator, which also
            gives the dense layers theirs.
        storage: budgets for the tiers that rows may lie in.
        device: where it is made, as ``to(device)`` would have it but without tables in RAM first.

    ``model(batch)`` takes a dict with ``"dense"``, float (B, num_dense), and every feature, and
    returns logits (B,).

    Raises:
        TableError: a table has another width than `dim`, there is none, or the product is unknown.
    """

    def __init__(
        self,
        tables: Sequence[str | Table],
        dim: int = 16,
        num_dense: int = 13,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        product: str = "inner",
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
    ) -> None:
        if product not in ("inner", "outer"):
            raise TableError(f"PNN: product is {product!r}. Pass 'inner' or 'outer'.")
        config = {"hidden": list(hidden), "dropout": dropout, "product": product}
        super().__init__(
            tables,
            dim,
            num_dense,
            linear=False,
            config=config,
            seed=seed,
            storage=storage,
            device=device,
        )
        count = len(self.features)
        products = count * (count - 1) // 2 if product == "inner" else dim * dim
        self.product = product
        self.deep = MLP(self.width + products, [*hidden, 1], dropout=dropout)
        if device is not None:
            self.to(device)

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
