"""DeepFM and xDeepFM: a linear part, products of vectors, and a deep part, over the same embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hotbed.devices import Device
from hotbed.models.click import ClickModel
from hotbed.nn import MLP, CompressedInteraction, FactorizationMachine
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["DeepFM", "XDeepFM"]


class DeepFM(ClickModel):
    """DeepFM (Guo et al., arXiv:1703.04247).

    Logits are the sum of a linear part (a weight for each id and each dense column), the dot products of all
    pairs of vectors, and an MLP over the dense columns and the vectors side by side.

    Args:
        tables: names of dynamic tables, which start from Normal(0, 0.01), or `Table`s of width
            `dim`. Each is a feature of the batch; table ``C1`` has the twin ``C1.wide`` of width 1.
        dim: width of the tables.
        num_dense: columns of ``batch["dense"]``.
        hidden: widths of the MLP's hidden layers.
        dropout: the share of their values set to zero while training.
        seed: fixes the tables' first values; None draws it from torch's generator, which also
            gives the dense layers theirs.
        storage: budgets for the tiers that rows may lie in.
        device: where it is made, as ``to(device)`` would have it but without tables in RAM first.

    ``model(batch)`` takes a dict with ``"dense"``, float (B, num_dense), and every feature, and
    returns logits (B,).

    Raises:
        TableError: a table has another width than `dim`, or there is none.
    """

    def __init__(
        self,
        tables: Sequence[str | Table],
        dim: int = 16,
        num_dense: int = 13,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
    ) -> None:
        config = {"hidden": list(hidden), "dropout": dropout}
        super().__init__(
            tables,
            dim,
            num_dense,
            linear=True,
            config=config,
            seed=seed,
            storage=storage,
            device=device,
        )
        self.pairs = FactorizationMachine()
        self.deep = MLP(self.width, [*hidden, 1], dropout=dropout)
        if device is not None:
            self.to(device)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, linear = self.look_up(batch)
        deep = self.deep(self.side_by_side(batch, vectors))
        logits: Tensor = (linear + self.pairs(vectors) + deep).squeeze(1)
        return logits


class XDeepFM(ClickModel):
    """xDeepFM (Lian et al., arXiv:1803.05170).

    As `DeepFM`, with a compressed interaction network in place of the dot products.

    Args:
        tables: as of `DeepFM`, like all arguments but
        maps: of each layer of the compressed interaction network.

    Raises:
        TableError: a table has another width than `dim`, or there is none.
    """

    def __init__(
        self,
        tables: Sequence[str | Table],
        dim: int = 16,
        num_dense: int = 13,
        hidden: Sequence[int] = (256, 128),
        dropout: float = 0.0,
        maps: Sequence[int] = (16, 16, 16),
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
    ) -> None:
        config = {"hidden": list(hidden), "dropout": dropout, "maps": list(maps)}
        super().__init__(
            tables,
            dim,
            num_dense,
            linear=True,
            config=config,
            seed=seed,
            storage=storage,
            device=device,
        )
        self.interaction = CompressedInteraction(len(self.features), list(maps))
        self.of_maps = nn.Linear(self.interaction.out_features, 1)
        self.deep = MLP(self.width, [*hidden, 1], dropout=dropout)
        if device is not None:
            self.to(device)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, linear = self.look_up(batch)
        deep = self.deep(self.side_by_side(batch, vectors))
        products = self.of_maps(self.interaction(vectors))
        logits: Tensor = (linear + products + deep).squeeze(1)
        return logits
