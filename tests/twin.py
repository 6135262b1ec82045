"""The naive twin: what a lookup and its gradients are, one bag after the other in plain torch."""

from __future__ import annotations

import torch
from batches import Feature
from torch import Tensor

import hotbed as hb


class Twin:
    """Answers a batch of a collection from copies of the rows that it uses.

    `rows[name]` is a float64 leaf (n, dim), one row for each distinct id of that table in the batch;
    `weights[feature]` lists the float64 leaves of a feature's weights, one list a bag.
    """

    def __init__(self, collection: hb.EmbeddingCollection, batch: list[Feature]) -> None:
        self.batch = batch
        self.ids: dict[str, list[int]] = {}
        self.rows: dict[str, Tensor] = {}
        for name in {feature.table.name for feature in batch}:
            met = {i for f in batch if f.table.name == name for bag in f.bags for i in bag}
            self.ids[name] = sorted(met)
            values = collection.lookup(name, torch.tensor(self.ids[name], dtype=torch.int64))
            self.rows[name] = values.double().requires_grad_()
        self.weights = {
            f.name: [[torch.tensor(w).double().requires_grad_() for w in bag] for bag in f.weights]
            for f in batch
            if f.weights is not None
        }

    def outputs(self) -> dict[str, Tensor]:
        """(bags, dim) of pooled features, (ids, dim) of unpooled ones."""
        return {feature.name: self._feature(feature) for feature in self.batch}

    def _feature(self, feature: Feature) -> Tensor:
        vectors = [self._bag(feature, b) for b in range(len(feature.bags))]
        empty = torch.zeros((0, feature.table.dim), dtype=torch.float64)
        if feature.table.combiner == "none":
            return torch.cat([empty, *vectors])
        return torch.stack(vectors) if vectors else empty

    def _bag(self, feature: Feature, b: int) -> Tensor:
        table = feature.table
        known = self.ids[table.name]
        rows = self.rows[table.name]
        padding = table.padding_idx
        if table.combiner == "none":
            picked = [
                rows[known.index(i)].detach() if i == padding else rows[known.index(i)]
                for i in feature.bags[b]
            ]
            return torch.stack(picked) if picked else torch.zeros((0, table.dim)).double()
        kept = [k for k, i in enumerate(feature.bags[b]) if i != padding]
        if not kept:
            return torch.zeros(table.dim, dtype=torch.float64)
        vectors = [rows[known.index(feature.bags[b][k])] for k in kept]
        if table.combiner == "max":
            first = torch.stack(vectors).detach().numpy().argmax(0)
            return torch.stack([vectors[at][j] for j, at in enumerate(first)])
        if feature.name in self.weights:
            weights = [self.weights[feature.name][b][k] for k in kept]
        else:
            weights = [torch.ones((), dtype=torch.float64) for _ in kept]
        total = sum((w * v for w, v in zip(weights, vectors, strict=True)), torch.zeros(()))
        if table.combiner == "sum":
            return total
        if table.combiner == "mean":
            divisor = sum(weights, torch.zeros(()))
        else:
            divisor = sum((w * w for w in weights), torch.zeros(())).sqrt()
        return total * 0 if divisor == 0 else total / divisor
