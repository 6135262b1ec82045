"""Vectors of a bundle, by the ids of a batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import IdError
from hotbed.serve.bundle import LookupEntry, TableEntry
from hotbed.serve.row_formats import ROW_FORMATS, Stored

__all__ = ["BundleTable", "MappedRows", "vectors_of"]


class MappedRows:
    """Rows of a table in one bundle, whose files are mapped into memory."""

    def __init__(self, folder: str, about: TableEntry) -> None:
        self.about, self.how = about, ROW_FORMATS[about["stored_as"]]
        self._folder = folder
        self.rows, self.default = self._mapped("rows"), self._mapped("default")
        self.scales = None if self.how.scale_dtype is None else self._mapped("scales")
        self.ids = None if about["static"] else self._mapped("ids")

    def _mapped(self, part: str) -> Tensor:
        path = os.path.join(self._folder, f"{self.about['files']}.{part}.npy")
        if not self.about["rows"]:
            return torch.from_numpy(np.load(path))
        return torch.from_numpy(np.load(path, mmap_mode="c"))  # writes, if any, go nowhere

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the rows of (n,) ids lie, and which have one."""
        if self.ids is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        count = self.about["rows"]
        at = torch.searchsorted(self.ids, ids).clamp_(max=max(0, count - 1))
        return at, self.ids[at] == ids if count else at < 0

    def decoded(self, at: Tensor) -> Tensor:
        """Return (n, dim) float32 rows."""
        scales = None if self.scales is None else self.scales[at]
        return self.how.decoded(Stored(self.rows[at], scales), self.about["dim"])


class BundleTable:
    """A table as it is served.

    Args:
        layers: rows of a bundle, and then those that changed since, oldest first, whose ids are told.
    """

    def __init__(self, layers: Sequence[MappedRows]) -> None:
        self.layers = tuple(layers)
        self.about = layers[0].about

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the (n, dim) float32 rows of (n,) ids; those without a row have the default.

        Raises:
            IdError: an id is outside of a static table.
        """
        asked = torch.from_numpy(np.ascontiguousarray(ids))
        if self.about["static"] and len(ids):
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.about["rows"]:
                raise IdError(f"ids must lie in [0, {self.about['rows']}).")
        rows = self.layers[0].default.expand(len(ids), -1).clone()
        missing = torch.arange(len(ids))
        for layer in reversed(self.layers):
            at, there = layer.find(asked[missing])
            rows[missing[there]] = layer.decoded(at[there])
            missing = missing[~there]
        found: NDArray[np.float32] = rows.numpy()
        return found


def vectors_of(
    lookup: LookupEntry,
    table: BundleTable,
    ids: NDArray[np.int64],
    offsets: NDArray[np.int64] | None,
) -> NDArray[np.generic]:
    """Return the vectors of a lookup as the dense part takes them.

    Args:
        ids: of any shape without combiner, each has a vector; else (n,), of all bags.
        offsets: (B + 1,) where bags begin and end; None without combiner.
    """
    padding, combiner = lookup["padding_idx"], lookup["combiner"]
    if combiner == "none":
        is_none = np.zeros(ids.shape, bool) if padding is None else ids == padding
        vectors = table.rows(np.where(is_none, 0, ids).ravel())
        vectors[is_none.ravel()] = 0
        return vectors.reshape(*ids.shape, -1).astype(lookup["dtype"], copy=False)
    assert offsets is not None
    lengths = np.diff(offsets)
    bag_of = np.repeat(np.arange(len(lengths)), lengths)
    if padding is not None:
        kept = ids != padding
        ids, bag_of = ids[kept], bag_of[kept]
    rows = torch.from_numpy(table.rows(ids))
    index = torch.from_numpy(bag_of)
    counts = torch.bincount(index, minlength=len(lengths)).clamp_(min=1).to(rows.dtype)[:, None]
    out = torch.zeros(len(lengths), rows.shape[1])
    if combiner == "max":
        out.scatter_reduce_(0, index[:, None].expand_as(rows), rows, "amax", include_self=False)
    else:
        out.index_add_(0, index, rows)
        divisors: Mapping[str, Tensor | int] = {"sum": 1, "mean": counts, "sqrtn": counts.sqrt()}
        out = out / divisors[combiner]
    return out.numpy().astype(lookup["dtype"], copy=False)
