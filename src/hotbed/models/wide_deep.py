"""Wide & deep: a linear model and a deep one that share their inputs.

Shapes: B samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotbed.collection import EmbeddingCollection
from hotbed.devices import Device
from hotbed.init import Zeros
from hotbed.models.dlrm import tables_of
from hotbed.nn import MLP, concat
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["WideDeep"]


class WideDeep(nn.Module):
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
        super().__init__()
        deep = tables_of(tables, dim)
        self.config: dict[str, object] = {
            "tables": deep,
            "dim": dim,
            "num_dense": num_dense,
            "hidden": list(hidden),
        }
        """Arguments that make a model of the same shape."""
        self.features = [table.name for table in deep]
        wide = [
            dataclasses.replace(table, name=f"{table.name}.wide", dim=1, init=Zeros())
            for table in deep
        ]
        # One collection for both, so that a batch is resolved and looked up in one call.
        features = {table.name: table.name for table in (*deep, *wide)}
        self.embeddings = EmbeddingCollection(
            [*deep, *wide], features, seed=seed, storage=storage, device=device
        )
        self.wide = nn.Linear(num_dense, 1)
        self.deep = MLP(num_dense + dim * len(deep), [*hidden, 1])
        if device is not None:
            self.to(device)

    def embedding_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `embeddings` looks up of a batch; `hotbed.lookahead` asks for it."""
        inputs = {name: batch[name] for name in self.features}
        inputs.update({f"{name}.wide": batch[name] for name in self.features})
        return inputs

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors = list(self.embeddings(self.embedding_inputs(batch)).values())
        count = len(self.features)
        dense = batch["dense"]
        deep = self.deep(torch.cat([dense, concat(vectors[:count])], 1))
        wide = self.wide(dense) + concat(vectors[count:]).sum(1, keepdim=True)
        logits: Tensor = (wide + deep).squeeze(1)
        return logits
