"""`RowCodec`: the form in which rows of a table lie in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hotbed.errors import TableError

__all__ = ["Piece", "RowCodec", "Spot"]

_MOST_BYTES = 1 << 24
"""Most bytes of a row in a message: four for each of the most columns that a table may have."""


class Piece(NamedTuple):
    """Rows of one shard in a message, as the core has them."""

    rows: int
    width: int
    dtype: torch.dtype
    codec: RowCodec
    seed: int
    """Of what is rounded at random."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the message.

        Raises:
            TableError: the codec gives no such number.
        """
        size = self.codec.row_bytes(self.width, self.dtype)
        if type(size) is not int or not 0 <= size <= _MOST_BYTES:
            raise TableError(
                f"row_bytes({self.width}, {self.dtype}) of the codec {type(self.codec).__name__} must return "
                f"an int from 0 to {_MOST_BYTES:,}, got {size!r}."
            )
        return size


class Spot(NamedTuple):
    """A piece, and where it is."""

    piece: Piece
    in_core: Tensor
    """(bytes,) uint8 in which its rows begin at `at`, as the core has them."""
    at: int
    message: Tensor
    """(bytes,) uint8 in which they begin at `begin`, as they travel."""
    begin: int

    def as_rows(self) -> Tensor:
        """(n, width), as the core has them."""
        count, width, dtype, *_ = self.piece
        end = self.at + count * width * dtype.itemsize
        return self.in_core[self.at : end].view(dtype).view(count, width)

    def as_bytes(self, size: int) -> Tensor:
        """(n, size) uint8, as they travel."""
        end = self.begin + self.piece.rows * size
        return self.message[self.begin : end].view(self.piece.rows, size)


class RowCodec(Protocol):
    """Form of rows in messages. The core writes and reads messages as it has rows in memory.

    Attributes:
        is_stored: True if messages are what the core has.
        can_fail: True if `decode` may raise: with such a codec of rows the ranks vote once more in each
        lookup.
    """

    @property
    def is_stored(self) -> bool: ...
    @property
    def can_fail(self) -> bool: ...

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row in messages."""

    def encode(self, spots: Sequence[Spot]) -> None:
        """Write messages from rows as the core has them."""

    def decode(self, spots: Sequence[Spot]) -> None:
        """Write rows as the core has them from messages."""
