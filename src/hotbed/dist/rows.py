"""Rows on their way: which a rank is to have, and how they lie in a message.

Shapes: n ids of a table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.wire import block, rounded

__all__ = ["Form", "Rows", "by_keeper", "inverse_of"]


class Form(NamedTuple):
    """Numbers that travel for each id."""

    dtype: torch.dtype
    width: int

    def size(self, count: int) -> int:
        """In bytes, in a message."""
        return rounded(count * self.width * self.dtype.itemsize)

    def of(self, message: Tensor, begin: int, count: int) -> Tensor:
        """(count, width) that begin there."""
        end = begin + count * self.width * self.dtype.itemsize
        return message[begin:end].view(self.dtype).view(count, self.width)


class Rows(NamedTuple):
    """Some rows, or columns of them, in memory that has more, or in another order."""

    rows: Tensor
    """(any, dim)."""
    at: slice | Tensor = slice(None)
    """(n,) positions of those meant."""
    columns: slice = slice(None)

    def cut(self, at: slice, columns: slice) -> Rows:
        """A part of them."""
        if isinstance(self.at, slice):
            return Rows(self.rows[self.at], at, columns)
        return Rows(self.rows, self.at[at], columns)

    def made(self) -> Tensor:
        """(n, columns)."""
        if isinstance(self.at, slice):
            return self.rows[self.at][:, self.columns]
        width = len(range(*self.columns.indices(self.rows.shape[1])))
        made = (
            block(len(self.at) * width * self.rows.itemsize).view(self.rows.dtype).view(-1, width)
        )
        self.write(made)
        return made

    def write(self, out: Tensor) -> None:
        """To (n, columns) contiguous."""
        if isinstance(self.at, Tensor) and out.shape[1] == self.rows.shape[1]:
            torch.index_select(self.rows, 0, self.at, out=out)
        else:
            out.copy_(self.rows[self.at][:, self.columns])


def by_keeper(place: Any, ids: Tensor) -> tuple[Tensor, Tensor | None, list[slice]]:
    """(n,) ids by their keepers, where each has gone (None: nowhere), and which of them each share has."""
    dealing = place.kind.dealing(place.spec)
    if dealing is None:
        return ids, None, [slice(0, len(ids))] * len(place.shares)
    ids, ordered, moved = ids.contiguous(), torch.empty_like(ids), torch.empty_like(ids)
    written = ordered.data_ptr(), moved.data_ptr()
    counts = _core.order_by_keeper(ids.data_ptr(), len(ids), place.ranks.size, dealing, *written)
    slices, begin = [], 0
    for count in counts:
        slices.append(slice(begin, begin + count))
        begin += count
    return ordered, moved, [slices[share.rank] for share in place.shares]


def inverse_of(moved: Tensor) -> Tensor:
    """Of (n,) places to which the numbers from 0 on have gone: which number is at each."""
    return torch.empty_like(moved).index_copy_(0, moved, torch.arange(len(moved)))
