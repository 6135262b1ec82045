"""Rows in fewer bytes than they are stored, by the core."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotbed import _core
from hotbed.dist.row_codecs.codec import Spot
from hotbed.tables import CORE_DTYPES

__all__ = ["Shorter"]


class Shorter:
    """`RowCodec` of ``"float16"``, ``"bfloat16"`` and ``"int8"``.

    An int8 row is a scale, a float32, and a byte a number: the codes of `hotbed.ops.codec.encode`, which says
    what becomes of zeros, NaN and infinity. Of a table cut by columns each slice has a scale.
    """

    is_stored = False
    can_fail = False

    def __init__(self, form: _core.WireForm, at_random: bool = False) -> None:
        """`at_random`: int8 rounds up with the probability of what is cut off, so that sums of many are right
        in the mean; equal rows of a step become equal bytes."""
        self._form, self._at_random = form, at_random

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return _core.wire_row_bytes(self._form, width)

    def encode(self, spots: Sequence[Spot]) -> None:
        _core.encode_pieces(self._pieces(spots))

    def decode(self, spots: Sequence[Spot]) -> None:
        _core.decode_pieces(self._pieces(spots))

    def _pieces(
        self, spots: Sequence[Spot]
    ) -> list[tuple[_core.WireForm, _core.DType, int, int, int, int, bool, int]]:
        return [
            (
                self._form,
                CORE_DTYPES[spot.piece.dtype],
                spot.piece.rows,
                spot.piece.width,
                spot.in_core.data_ptr() + spot.at,
                spot.message.data_ptr() + spot.begin,
                self._at_random,
                spot.piece.seed,
            )
            for spot in spots
        ]
