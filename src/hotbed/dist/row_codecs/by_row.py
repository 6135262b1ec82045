"""Codecs that say how one row is laid out."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.raw import rounded
from hotbed.dist.row_codecs.codec import Piece, Travel
from hotbed.errors import TableError

__all__ = ["ByRow"]

_MOST_BYTES = 1 << 24
"""Most bytes of a row in a message: four for each of the most columns that a table may have."""


class ByRow(abc.ABC):
    """`RowCodec` by what becomes of each row.

    A call gets the rows of one shard for one rank, or from it: n rows of `width` numbers; n may be 0. Rows
    have the dtype of their table, gradients its compute dtype, float64 among them. Of a table cut by columns
    a row is the columns of one shard, so a scale a row is one for each such slice.

    * **Memory**: rows and bytes are contiguous and begin at multiples of 8 bytes. `out.view(torch.float16)`
      needs a `row_bytes` that 2 divides, and ``out[:, :4].view(torch.float32)`` one that 4 divides; else
      convert first, and copy bytes. Write all of `out`, and keep none of it.
    * **Sizes**: `row_bytes` depends on its arguments alone and is the same on all ranks, as the receiver
      computes it, too.
    * **All rows of lookups, and all gradients,** pass the codec, those that a rank has of itself and of
      replicated tables included, so that results do not depend on who owns a row. Rows read and written by id
      travel as they are stored.
    * **Equal rows become equal bytes**: gradients of a replicated table are encoded for each rank, and
      rounding at random would let its copies drift apart.
    * **NaN and infinite gradients stay so**: owners look for them in what they decode.
    * **Errors** on one rank are raised there and, as `PeerError`, on all others; no row changes, but new ids
      of a forward may stay. As `decode_rows` may raise, a codec of rows costs each lookup one more
      vote; gradients are covered by that of the step.
    """

    can_fail = True

    @abc.abstractmethod
    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row in messages."""

    @abc.abstractmethod
    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        """Write (n, width) rows to (n, row_bytes) uint8."""

    @abc.abstractmethod
    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        """Write (n, row_bytes) uint8 to (n, width) rows."""

    def sizes(self, in_core: list[int], travel: Travel, *, sent: bool) -> list[int]:
        """Return the bytes of the message to each rank, or from it."""
        return [sum(map(self._bytes, pieces)) for pieces in travel.pieces(sent=sent)]

    def buffers(self, messages: list[Tensor], in_core: list[int]) -> list[Tensor]:
        """Return memory to which the core writes rows."""
        return [_core.block(size) for size in in_core]

    def encode(self, buffers: list[Tensor], messages: list[Tensor], travel: Travel) -> None:
        """Write the messages."""
        for rows, encoded in self._pairs(buffers, messages, travel.pieces(sent=True)):
            self.encode_rows(rows, encoded)

    def decode(self, messages: list[Tensor], in_core: list[int], travel: Travel) -> list[Tensor]:
        """Return messages that came, as the core reads them."""
        buffers = self.buffers(messages, in_core)
        for rows, encoded in self._pairs(buffers, messages, travel.pieces(sent=False)):
            self.decode_rows(encoded, rows)
        return buffers

    def _pairs(
        self, buffers: list[Tensor], messages: list[Tensor], every: Sequence[Sequence[Piece]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece as rows and as it travels."""
        for in_core, message, pieces in zip(buffers, messages, every, strict=True):
            at = begin = 0
            for piece in pieces:
                count, width, dtype = piece
                size = self._row_bytes(width, dtype)
                rows = in_core[at : at + count * width * dtype.itemsize].view(dtype)
                encoded = message[begin : begin + count * size]
                yield rows.view(count, width), encoded.view(count, size)
                at += rounded(count * width * dtype.itemsize)
                begin += self._bytes(piece)

    def _bytes(self, piece: Piece) -> int:
        return rounded(piece.rows * self._row_bytes(piece.width, piece.dtype))

    def _row_bytes(self, width: int, dtype: torch.dtype) -> int:
        size = self.row_bytes(width, dtype)
        if type(size) is not int or not 0 <= size <= _MOST_BYTES:
            raise TableError(
                f"row_bytes({width}, {dtype}) of the codec {type(self).__name__} must return an int from 0 "
                f"to {_MOST_BYTES:,}, got {size!r}."
            )
        return size
