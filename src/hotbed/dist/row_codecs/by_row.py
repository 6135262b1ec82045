"""Codecs that say how one row is laid out."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed.dist.row_codecs.codec import Spot

__all__ = ["ByRow"]


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

    is_stored = False
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

    def encode(self, spots: Sequence[Spot]) -> None:
        """Write messages."""
        for spot in spots:
            rows = spot.as_rows()
            self.encode_rows(rows, spot.as_bytes(spot.piece.row_bytes))

    def decode(self, spots: Sequence[Spot]) -> None:
        """Write rows that came."""
        for spot in spots:
            self.decode_rows(spot.as_bytes(spot.piece.row_bytes), spot.as_rows())
