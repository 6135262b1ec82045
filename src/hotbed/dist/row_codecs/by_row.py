"""Codecs that say how one row is laid out."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.raw import rounded
from hotbed.dist.row_codecs.codec import Piece, Travel

__all__ = ["ByRow"]


class ByRow(abc.ABC):
    """`RowCodec` by what becomes of each row.

    Shapes: n rows of `width` numbers, of the dtype of their table, or of its compute dtype where they are
    gradients; each becomes `row_bytes` bytes.
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

    def room(self, messages: list[Tensor], in_core: list[int]) -> list[Tensor]:
        """Return memory to which the core writes rows."""
        return [_core.block(size) for size in in_core]

    def encode(self, room: list[Tensor], messages: list[Tensor], travel: Travel) -> None:
        """Write the messages."""
        for rows, encoded in self._pairs(room, messages, travel.pieces(sent=True)):
            self.encode_rows(rows, encoded)

    def decode(self, messages: list[Tensor], in_core: list[int], travel: Travel) -> list[Tensor]:
        """Return messages that came, as the core reads them."""
        room = self.room(messages, in_core)
        for rows, encoded in self._pairs(room, messages, travel.pieces(sent=False)):
            self.decode_rows(encoded, rows)
        return room

    def _pairs(
        self, room: list[Tensor], messages: list[Tensor], every: Sequence[Sequence[Piece]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece as rows and as it travels."""
        for in_core, message, pieces in zip(room, messages, every, strict=True):
            at = begin = 0
            for piece in pieces:
                count, width, dtype = piece
                size = self.row_bytes(width, dtype)
                rows = in_core[at : at + count * width * dtype.itemsize].view(dtype)
                encoded = message[begin : begin + count * size]
                yield rows.view(count, width), encoded.view(count, size)
                at += rounded(count * width * dtype.itemsize)
                begin += self._bytes(piece)

    def _bytes(self, piece: Piece) -> int:
        return rounded(piece.rows * self.row_bytes(piece.width, piece.dtype))
