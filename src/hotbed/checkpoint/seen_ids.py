"""Ids that newer checkpoints of a chain have had, or have removed."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = ["SeenIds", "seen_ids"]


class SeenIds(Protocol):
    """A set of ids."""

    def add(self, ids: Tensor) -> None:
        """Add (n,) int64 ids, which may be there."""

    def are_new(self, ids: Tensor) -> Tensor:
        """Return (n,) bool: True for those of (n,) int64 ids that were not added."""


def seen_ids(rows: int | None) -> SeenIds:
    """Return an empty set for the ids of a table of so many rows; None: of any ids."""
    return _AnyIds() if rows is None or rows > _MOST_MARKED else _Marked(rows)


_MOST_MARKED = 1 << 28


class _Marked:
    """A byte an id, of which the system gives those that are used."""

    def __init__(self, rows: int) -> None:
        self._seen = torch.from_numpy(np.zeros(rows, np.bool_))
        self._rows = rows

    def _inside(self, ids: Tensor) -> Tensor | None:
        """Return the mask of ids of the table; None: all are. (Others are refused by whoever takes rows.)"""
        if not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < self._rows:
            return None
        return (ids >= 0) & (ids < self._rows)

    def add(self, ids: Tensor) -> None:
        inside = self._inside(ids)
        self._seen[ids if inside is None else ids[inside]] = True

    def are_new(self, ids: Tensor) -> Tensor:
        inside = self._inside(ids)
        if inside is None:
            return ~torch.index_select(self._seen, 0, ids)
        new = torch.ones(len(ids), dtype=torch.bool, device="cpu")
        new[inside] = ~self._seen[ids[inside]]
        return new


class _AnyIds:
    """Eight bytes an id, rising."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")

    def add(self, ids: Tensor) -> None:
        new = torch.unique(ids[self.are_new(ids)])
        both = np.concatenate([self._ids.numpy(), new.numpy()])
        both.sort(kind="stable")  # of two that rise it takes one pass
        self._ids = torch.from_numpy(both)

    def are_new(self, ids: Tensor) -> Tensor:
        if not len(self._ids):
            return torch.ones(len(ids), dtype=torch.bool, device="cpu")
        at = torch.searchsorted(self._ids, ids).clamp_(max=len(self._ids) - 1)
        return self._ids[at] != ids
