"""Values as JSON has them as Arrow arrays, of the types that columns of files have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hotbed.data.arrow_values import BadValue
from hotbed.files import Json
from hotbed.text import brief

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["array_of", "lists_of"]

_SCALARS = {str, bool, int, float, type(None)}


def array_of(values: Sequence[Json]) -> pa.Array:
    """Return an array of text, numbers and nulls.

    Integers among text become text, and among fractions become floats, which have the same id or number.

    Raises:
        BadValue: a list or an object; fractions or booleans among what they cannot be told from.
    """
    import pyarrow as pa

    kinds = {*map(type, values)}
    if other := kinds - _SCALARS:
        row = _first(values, other)
        raise BadValue(row, f"{brief(values[row])} is neither text nor a number nor null.")
    kinds -= {type(None)}
    if not kinds:
        return pa.nulls(len(values))
    if bool in kinds and len(kinds) > 1:
        raise BadValue(_first(values, {bool}), "a boolean stands among other values.")
    if {str, float} <= kinds:
        row = _first(values, {float})
        raise BadValue(row, f"{values[row]!r} stands among text. Give all as numbers or as text.")
    if str in kinds:
        return pa.array(
            [str(each) if type(each) is int else each for each in values], pa.large_string()
        )
    if bool in kinds:
        return pa.array(values, pa.bool_())
    if float in kinds:
        numbers = [None if each is None else float(each) for each in values]  # type: ignore[arg-type]
        return pa.array(numbers, pa.float64())
    try:
        return pa.array(values, pa.int64())
    except (OverflowError, pa.ArrowInvalid):
        return pa.array([None if each is None else str(each) for each in values], pa.large_string())


def lists_of(values: Sequence[Json], separator: str) -> pa.Array:
    """Return an array of lists: those of JSON, text cut at each `separator`, other values alone, null empty.

    Raises:
        BadValue: as of `array_of`, of what lists hold.
    """
    import pyarrow as pa

    bags = [_bag(each, separator) for each in values]
    offsets = np.zeros(len(bags) + 1, np.int64)
    np.cumsum([*map(len, bags)], out=offsets[1:])
    try:
        flat = array_of([each for bag in bags for each in bag])
    except BadValue as wrong:
        assert wrong.row is not None
        row = int(np.searchsorted(offsets, wrong.row, side="right")) - 1
        raise BadValue(row, wrong.text) from None
    return pa.LargeListArray.from_arrays(pa.array(offsets), flat)


def _bag(value: Json, separator: str) -> Sequence[Json]:
    if isinstance(value, list):
        return value
    if isinstance(value, str) and separator:
        return value.split(separator)
    return [] if value is None else [value]


def _first(values: Sequence[Json], kinds: set[type]) -> int:
    return next(row for row, each in enumerate(values) if type(each) in kinds)
