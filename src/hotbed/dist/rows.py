"""Rows on their way: which a rank is to have, and how they lie in a message.

Shapes: n ids of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.wire import WORD, block, rounded

__all__ = ["Form", "Rows", "cut", "dealt", "inverse_of"]


class Form(NamedTuple):
    """Numbers that travel for each id."""

    dtype: torch.dtype
    width: int

    def size(self, count: int) -> int:
        """In bytes, in a message."""
        return rounded(count * self.width * self.dtype.itemsize)


def cut(message: Tensor, forms: Sequence[Form], counts: Sequence[int]) -> Sequence[Tensor]:
    """(count, width) pieces of a message that has them one after the other."""
    alike = len(set(forms)) == 1
    if alike and forms[0].width * forms[0].dtype.itemsize % WORD == 0:  # nothing is rounded
        rows: Any = message.view(forms[0].dtype)
        pieces: Sequence[Tensor] = torch.split(rows.view(-1, forms[0].width), list(counts))
        return pieces
    sizes = [form.size(count) for form, count in zip(forms, counts, strict=True)]
    return [
        piece[: count * form.width * form.dtype.itemsize].view(form.dtype).view(count, form.width)
        for piece, form, count in zip(message.split(sizes), forms, counts, strict=True)  # type: ignore[no-untyped-call]
    ]


class Rows(NamedTuple):
    """Some rows, or columns of them, in memory that has more, or in another order."""

    rows: Tensor
    """(any, dim)."""
    at: slice | Tensor = slice(None)
    """(n,) positions of those meant."""
    columns: slice | None = None
    """None: all."""

    def cut(self, begin: int, end: int, columns: slice | None) -> Rows:
        """A part of them."""
        if isinstance(self.at, slice):
            whole = (begin, end) == (0, self.rows.shape[0])
            return Rows(self.rows if whole else self.rows[begin:end], columns=columns)
        whole = (begin, end) == (0, self.at.shape[0])
        return Rows(self.rows, self.at if whole else self.at[begin:end], columns)

    def made(self) -> Tensor:
        """(n, columns)."""
        if isinstance(self.at, slice):
            return self.rows if self.columns is None else self.rows[:, self.columns]
        width = self.rows.shape[1]
        if self.columns is not None:
            width = len(range(*self.columns.indices(width)))
        made = block(self.at.shape[0] * width * self.rows.itemsize).view(self.rows.dtype)
        self.write(made.view(-1, width))
        return made.view(-1, width)

    def write(self, out: Tensor) -> None:
        """To (n, columns) contiguous."""
        if isinstance(self.at, slice):
            out.copy_(self.rows if self.columns is None else self.rows[:, self.columns])
        elif self.columns is None:
            torch.index_select(self.rows, 0, self.at, out=out)
        else:
            out.copy_(self.rows[self.at][:, self.columns])


def dealt(ids: Tensor, dealing: _core.Dealing, ranks: int) -> tuple[Tensor, Tensor, list[int]]:
    """(n,) ids ordered by their keepers, where each has gone, and how many each rank has."""
    ids, ordered, moved = ids.contiguous(), torch.empty_like(ids), torch.empty_like(ids)
    written = ordered.data_ptr(), moved.data_ptr()
    counts = _core.order_by_keeper(ids.data_ptr(), ids.shape[0], ranks, dealing, *written)
    return ordered, moved, counts


def inverse_of(moved: Tensor) -> Tensor:
    """Inverse permutation, shape (n,)."""
    return torch.empty_like(moved).index_copy_(0, moved, torch.arange(moved.shape[0]))
