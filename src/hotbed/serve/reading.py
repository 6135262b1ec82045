"""Vectors of a bundle, by the ids of a batch."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hotbed.errors import IdError
from hotbed.jagged import Jagged
from hotbed.serve.bundle import LookupEntry, TableEntry
from hotbed.serve.row_formats import ROW_FORMATS, Stored

__all__ = ["BundleTable", "vectors_of"]


class BundleTable:
    """A table of a bundle, whose files are mapped into memory."""

    def __init__(self, folder: str, about: TableEntry) -> None:
        self.about, self.how = about, ROW_FORMATS[about["stored_as"]]
        self._folder = folder
        self._rows, self._default = self._mapped("rows"), self._mapped("default")
        self._scales = None if self.how.scale_dtype is None else self._mapped("scales")
        self._ids = None if about["static"] else self._mapped("ids")

    def _mapped(self, part: str) -> Tensor:
        path = os.path.join(self._folder, f"{self.about['files']}.{part}.npy")
        if not self.about["rows"]:
            return torch.from_numpy(np.load(path))
        return torch.from_numpy(np.load(path, mmap_mode="c"))  # writes, if any, go nowhere

    def rows(self, ids: Tensor) -> Tensor:
        """Return the (n, dim) float32 rows of (n,) ids; those without a row have the default.

        Raises:
            IdError: an id is outside of a static table.
        """
        count = self.about["rows"]
        if self._ids is None:
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                raise IdError(f"ids must lie in [0, {count}).")
            return self._decoded(ids)
        at = torch.searchsorted(self._ids, ids).clamp_(max=max(0, count - 1))
        found = self._ids[at] == ids if count else at < 0
        rows = self._default.expand(len(ids), -1).clone()
        rows[found] = self._decoded(at[found])
        return rows

    def _decoded(self, at: Tensor) -> Tensor:
        scales = None if self._scales is None else self._scales[at]
        return self.how.decoded(Stored(self._rows[at], scales), self.about["dim"])


def vectors_of(lookup: LookupEntry, table: BundleTable, ids: object) -> Tensor:
    """Return the vectors of a lookup as the dense part takes them. `ids`: (B,), (B, K) or `Jagged`."""
    dtype = getattr(torch, lookup["dtype"])
    padding, combiner = lookup["padding_idx"], lookup["combiner"]
    if combiner == "none":
        assert isinstance(ids, Tensor)
        is_none = torch.zeros_like(ids, dtype=torch.bool) if padding is None else ids == padding
        vectors = table.rows(torch.where(is_none, 0, ids).flatten().long())
        vectors[is_none.flatten()] = 0
        return vectors.reshape(*ids.shape, -1).to(dtype)
    bags = ids if isinstance(ids, Jagged) else _bags(ids)
    lengths = bags.offsets.diff()
    bag_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    kept = slice(None) if padding is None else bags.values != padding
    bag_of, rows = bag_of[kept], table.rows(bags.values[kept].long())
    counts = torch.bincount(bag_of, minlength=len(lengths)).clamp_(min=1).to(rows.dtype)[:, None]
    out = torch.zeros(len(lengths), rows.shape[1])
    if combiner == "max":
        index = bag_of[:, None].expand_as(rows)
        return out.scatter_reduce_(0, index, rows, "amax", include_self=False).to(dtype)
    out.index_add_(0, bag_of, rows)
    divisors: Mapping[str, Tensor | int] = {"sum": 1, "mean": counts, "sqrtn": counts.sqrt()}
    return (out / divisors[combiner]).to(dtype)


def _bags(ids: object) -> Jagged:
    assert isinstance(ids, Tensor)
    each = ids[:, None] if ids.dim() == 1 else ids
    lengths = torch.full((len(each),), each.shape[1], dtype=torch.int64)
    return Jagged(each.reshape(-1), lengths=lengths)
