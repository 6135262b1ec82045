"""Deep & cross networks, the first and the second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from hotbed.devices import Device
from hotbed.models.click import ClickModel
from hotbed.nn import MLP, CrossInteraction
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["DCN", "DCNv1"]


class DCN(ClickModel):
    """Deep & cross network V2 (Wang et al., arXiv:2008.13535), in its parallel form.

    Cross layers and an MLP both see the dense columns and the vectors side by side; a linear layer over the
    outputs of both gives the logits.

    Args:
        tables: names of dynamic tables, which start from Normal(0, 0.01), or `Table`s of width
            `dim`. Each is a feature of the batch.
        dim: width of the tables.
        num_dense: columns of ``batch["dense"]``.
        hidden: widths of the MLP.
        dropout: the share of the values of its layers set to zero while training.
        layers: number of cross layers.
        seed: fixes the tables' first values; None draws it from torch's generator, which also
            gives the dense layers theirs.
        storage: budgets for the tiers that rows may lie in.
        device: where it is made, as ``to(device)`` would have it but without tables in RAM first.

    ``model(batch)`` takes a dict with ``"dense"``, float (B, num_dense), and every feature, and
    returns logits (B,).

    Raises:
        TableError: a table has another width than `dim`, there is none, or cross layers cannot be so.
    """

    form: ClassVar[str] = "matrix"
    """Of the cross layers; see `hotbed.nn.CrossInteraction`."""

    def __init__(
        self,
        tables: Sequence[str | Table],
        dim: int = 16,
        num_dense: int = 13,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        layers: int = 3,
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
    ) -> None:
        config = {
            "hidden": list(hidden),
            "dropout": dropout,
            "layers": layers,
        }
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
        self.cross = CrossInteraction(self.width, layers, self.form)
        self.deep = MLP(self.width, list(hidden), final_activation="relu", dropout=dropout)
        self.top = nn.Linear(self.width + hidden[-1], 1)
        if device is not None:
            self.to(device)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, _ = self.look_up(batch)
        x = self.side_by_side(batch, vectors)
        logits: Tensor = self.top(torch.cat([self.cross(x), self.deep(x)], 1)).squeeze(1)
        return logits


class DCNv1(DCN):
    """Deep & cross network, the first (Wang et al., arXiv:1708.05123): as `DCN`, with a vector in place of a
    matrix in each cross layer."""

    form = "vector"
