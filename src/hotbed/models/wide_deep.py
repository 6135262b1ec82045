"""Wide & deep: a linear model and a deep one that share their inputs.

Shapes: B samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hotbed.devices import Device
from hotbed.models.click import ClickModel
from hotbed.nn import MLP
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["WideDeep"]


class WideDeep(ClickModel):
    """Wide & deep learning (Cheng et al., arXiv:1606.07792).

    The wide part gives every id a weight of its own (a table of width 1 for each feature, from
    zero) and every dense column one; the deep part is an MLP over the embeddings and the dense
    columns side by side. Their sums are the logits.

    Args:
        tables: names of dynamic tables, which start from Normal(0, 0.01), or `Table`s of width
            `dim`. Each is a feature of the batch; table ``C1`` has the wide twin ``C1.wide``.
        dim: width of the deep part's tables.
        num_dense: columns of ``batch["dense"]``.
        hidden: widths of the deep part's hidden layers.
        seed: fixes the tables' first values; None draws it from torch's generator, which also
            gives the dense layers theirs.
        storage: budgets for the tiers that rows may lie in.
        device: where it is made, as ``to(device)`` would have it but without tables in RAM first.

    ``model(batch)`` takes a dict with ``"dense"``, float (B, num_dense), and every feature, and
    returns logits (B,).

    Raises:
        TableError: a table has another width than `dim`.
    """

    def __init__(
        self,
        tables: Sequence[str | Table],
        dim: int = 16,
        num_dense: int = 13,
        hidden: Sequence[int] = (256, 128),
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__(
            tables,
            dim,
            num_dense,
            linear=True,
            config={"hidden": list(hidden)},
            seed=seed,
            storage=storage,
            device=device,
        )
        self.deep = MLP(self.width, [*hidden, 1])
        if device is not None:
            self.to(device)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, linear = self.look_up(batch)
        logits: Tensor = (linear + self.deep(self.side_by_side(batch, vectors))).squeeze(1)
        return logits
