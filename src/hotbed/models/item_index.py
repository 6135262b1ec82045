"""Vectors of items, and exact search among them.

Shapes: N items, Q queries, w columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.arrays import id_tensor, integer
from hotbed.errors import InputError
from hotbed.files import appearing
from hotbed.models.two_tower import TwoTower
from hotbed.paths import path_text

__all__ = ["Found", "ItemIndex"]


class Found(NamedTuple):
    """Result of a search."""

    ids: Tensor
    """int64 (Q, k), the best first; -1 where there are fewer items than k."""
    scores: Tensor
    """float32 (Q, k), -inf where there are fewer items than k."""


class ItemIndex:
    """Ids and vectors of items; `search` compares a query with all of them, block by block.

    Args:
        ids: int64 (N,), each once.
        vectors: floating point (N, w), finite; kept in their dtype, and compared as float32.

    Raises:
        InputError: the shapes or dtypes do not fit, an id is there twice, or a vector has NaN or infinity.
    """

    def __init__(self, ids: Tensor, vectors: Tensor) -> None:
        ids, vectors = id_tensor("ItemIndex", ids).long(), vectors.detach()
        if ids.dim() != 1 or vectors.dim() != 2 or len(ids) != len(vectors):
            raise InputError(
                f"ItemIndex: ids have shape {tuple(ids.shape)}, vectors {tuple(vectors.shape)}. Pass (N,) "
                "and (N, w)."
            )
        if len(torch.unique(ids)) != len(ids):
            raise InputError("ItemIndex: an id is there twice. Pass each item once.")
        if not vectors.is_floating_point():
            raise InputError(f"ItemIndex: vectors are {vectors.dtype}. Convert them with .float().")
        is_finite = vectors.isfinite().all(1)
        if not is_finite.all():
            bad = int(ids[(~is_finite).to(ids.device)][0])
            raise InputError(f"ItemIndex: the vector of item {bad} has NaN or infinity.")
        self.ids, self.vectors = ids, vectors

    @classmethod
    def of(cls, model: TwoTower, batches: Iterable[Mapping[str, Tensor]]) -> ItemIndex:
        """Return the index of all items in `batches`, each of which has the item's features.

        The model is in evaluation mode meanwhile. An item that comes again keeps the vector that it had
        first.

        Raises:
            InputError: there are no batches, or one lacks a feature; or as of the constructor.
        """
        known: set[int] = set()
        ids: list[Tensor] = []
        vectors: list[Tensor] = []
        training = model.training
        model.eval()
        try:
            for batch in batches:
                each = model.item_ids(batch).tolist()
                first = {id_: at for at, id_ in reversed(list(enumerate(each))) if id_ not in known}
                known |= first.keys()
                with torch.no_grad():
                    made = model.item_vectors(batch)
                ids.append(torch.tensor([*first], dtype=torch.int64))
                vectors.append(made[[*first.values()]].float().cpu())
        finally:
            model.train(training)
        if not vectors:
            raise InputError("ItemIndex.of: there are no batches. Pass at least one.")
        return cls(torch.cat(ids), torch.cat(vectors))

    def __len__(self) -> int:
        return len(self.ids)

    def search(self, queries: Tensor, k: int = 10, *, block: int = 65_536) -> Found:
        """Return the `k` items whose products with each query are largest, exactly.

        Args:
            queries: (Q, w).
            k: how many.
            block: items compared at a time; memory is Q x `block` x 4 bytes.

        Raises:
            InputError: the queries have another width, or `k` or `block` is no positive integer.
        """
        for name, value in (("k", k), ("block", block)):
            if (integer(value) or 0) < 1:
                raise InputError(f"search: {name} is {value!r}. Pass a positive integer.")
        if queries.dim() != 2 or queries.shape[1] != self.vectors.shape[1]:
            raise InputError(
                f"search: queries have shape {tuple(queries.shape)}. Pass (Q, {self.vectors.shape[1]})."
            )
        queries = queries.detach().to(self.vectors.device, torch.float32)
        best = queries.new_full((len(queries), k), -torch.inf)
        at = torch.full((len(queries), k), -1, dtype=torch.int64, device=best.device)
        for begin in range(0, len(self.ids), block):
            scores = queries @ self.vectors[begin : begin + block].float().T
            top = scores.topk(min(k, scores.shape[1]), dim=1)
            both = torch.cat([best, top.values], 1)
            best, which = both.topk(k, dim=1)
            at = torch.cat([at, top.indices + begin], 1).gather(1, which)
        known = torch.cat([self.ids.to(at.device), at.new_full((1,), -1)])
        ids = known[at]  # position -1 is that of the -1
        return Found(ids, best)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file with ``ids`` and ``vectors``; it appears when it is complete."""
        from safetensors.torch import save_file

        tensors = {"ids": self.ids.contiguous(), "vectors": self.vectors.contiguous()}
        with appearing(path_text(path)) as part:
            save_file(tensors, part)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ItemIndex:
        """Return the index that `save` wrote.

        Raises:
            InputError: the file is no index of items, or `path` no path.
            FileNotFoundError: there is no such file.
        """
        from safetensors import SafetensorError, safe_open

        named = path_text(path)
        try:
            with safe_open(named, framework="pt") as file:
                return cls(file.get_tensor("ids"), file.get_tensor("vectors"))
        except SafetensorError as error:
            raise InputError(f"{named} is no index of items: {error}.") from None
