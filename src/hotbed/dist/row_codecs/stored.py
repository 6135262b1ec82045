"""Rows as the core has them: in the dtype of their table, gradients in its compute dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotbed.dist.raw import bytes_of
from hotbed.dist.row_codecs.codec import Spot

__all__ = ["Stored"]


class Stored:
    """`RowCodec` that copies; where all tables have it, rows are looked up right into messages."""

    is_stored = True
    can_fail = False

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return width * dtype.itemsize

    def encode(self, spots: Sequence[Spot]) -> None:
        for spot in spots:
            rows = bytes_of(spot.as_rows())
            spot.message[spot.begin : spot.begin + len(rows)] = rows

    def decode(self, spots: Sequence[Spot]) -> None:
        for spot in spots:
            rows = bytes_of(spot.as_rows())
            rows.copy_(spot.message[spot.begin : spot.begin + len(rows)])
