"""Base of click models: tables, dense columns, and a weight of its own for each id.

Shapes: B samples, F features, d columns of a vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotbed.collection import EmbeddingCollection
from hotbed.devices import Device
from hotbed.errors import TableError
from hotbed.init import Zeros
from hotbed.models.dense_columns import check_num_dense, check_samples, dense_of
from hotbed.models.dlrm import tables_of
from hotbed.nn import concat
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["ClickModel"]


class ClickModel(nn.Module):
    """Base of models that turn a batch into a logit a sample.

    Args:
        tables: names of dynamic tables, which start from Normal(0, 0.01), or `Table`s of width
            `dim`. Each is a feature of the batch; with a linear part ``C1`` has the twin ``C1.wide`` of
            width 1, from zero.
        dim: width of the tables.
        num_dense: columns of ``batch["dense"]``.
        linear: whether ids and dense columns have weights of their own.
        config: other arguments that make a model of the same shape.
        seed: fixes the tables' first values; None draws it from torch's generator, which also
            gives the dense layers theirs.
        storage: budgets for the tiers that rows may lie in.
        device: where tables are made.

    Raises:
        TableError: a table has another width than `dim`, or there is none; `num_dense` is negative.
    """

    def __init__(
        self,
        tables: Sequence[str | Table],
        dim: int,
        num_dense: int,
        *,
        linear: bool,
        config: Mapping[str, object],
        seed: int | None,
        storage: Storage | None,
        device: Device | None,
    ) -> None:
        super().__init__()
        check_num_dense(self, num_dense, 0)
        deep = tables_of(tables, dim)
        if not deep:
            raise TableError(f"{type(self).__name__}: tables is empty. Name at least one.")
        self.config: dict[str, object] = {
            "tables": deep,
            "dim": dim,
            "num_dense": num_dense,
            **config,
        }
        """Arguments that make a model of the same shape."""
        self.features = [table.name for table in deep]
        self.dim, self.num_dense = dim, num_dense
        wide = [
            dataclasses.replace(table, name=f"{table.name}.wide", dim=1, init=Zeros())
            for table in (deep if linear else ())
        ]
        # One collection for both, so that a batch is resolved and looked up in one call.
        features = {table.name: table.name for table in (*deep, *wide)}
        self.embeddings = EmbeddingCollection(
            [*deep, *wide], features, seed=seed, storage=storage, device=device
        )
        self.wide = nn.Linear(num_dense, 1) if linear else None

    @property
    def width(self) -> int:
        """Columns of the dense features and all vectors side by side."""
        return self.num_dense + self.dim * len(self.features)

    def embedding_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `embeddings` looks up of a batch; `hotbed.lookahead` asks for it."""
        inputs = {name: batch[name] for name in self.features}
        if self.wide is not None:
            inputs.update({f"{name}.wide": batch[name] for name in self.features})
        return inputs

    def look_up(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Return F vectors (B, d), and the linear part (B, 1) if there is one.

        Raises:
            InputError: ``batch["dense"]`` is not of shape (B, `num_dense`); or a feature cannot be looked up.
        """
        dense = dense_of(self, batch, self.num_dense)
        vectors = list(self.embeddings(self.embedding_inputs(batch)).values())
        check_samples(self, dense, self.features[0], vectors[0])
        count = len(self.features)
        if self.wide is None:
            return vectors, None
        weights = concat(vectors[count:]).sum(1, keepdim=True)
        return vectors[:count], self.wide(dense) + weights

    @staticmethod
    def side_by_side(batch: Mapping[str, Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """Return (B, `width`): dense columns, then the vectors."""
        return torch.cat([batch["dense"], concat(vectors)], 1)
