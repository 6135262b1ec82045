"""Values of Arrow columns as arrays: numbers, ids, bags of ids, text.

One value has one id, whatever type of column it lies in: text and integers of any width are hashed as
text. Empty text, null and NaN are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotbed import _core

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MISSING", "BadValue", "bags_of", "hashed", "integers", "numbers", "texts"]

MISSING = -1
"""Id of a value that is missing."""

_NULLS = ("", "NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "NaN", "nan", "\\N")
"""Texts that stand for a missing number, also as an integer id. As hashed ids all but "" are values."""
_EXACT = 2.0**53

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class BadValue(Exception):
    """A value that a column cannot have. `row` counts from 0; None: the column's type is wrong."""

    def __init__(self, row: int | None, text: str) -> None:
        super().__init__(text)
        self.row, self.text = row, text


def numbers(array: pa.Array) -> Floats:
    """(n,) float64; NaN where a value is missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array, kind = _plain(array)
    if pa.types.is_null(kind):
        return np.full(len(array), np.nan)
    if _is_text(kind):
        array = _numbers_of_text(array, pa.float64(), "a number")
    elif pa.types.is_boolean(kind) or pa.types.is_decimal(kind) or _is_number(kind):
        array = pc.cast(array, pa.float64(), safe=False)
    else:
        raise BadValue(None, f"has the type {kind}; numbers are needed.")
    found: Floats = array.to_numpy(zero_copy_only=False)
    return found


def integers(array: pa.Array) -> Ints:
    """(n,) int64 ids, which are the integers themselves; `MISSING` where one is missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array, kind = _plain(array)
    if pa.types.is_null(kind):
        return np.full(len(array), MISSING, np.int64)
    if _is_text(kind):
        array = _numbers_of_text(array, pa.int64(), "an integer below 2**63")
    elif pa.types.is_floating(kind):
        array = _integers_of_floats(array)
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        array = _cast(array, pa.int64(), "an integer below 2**63")
    else:
        raise _no_ids(kind)
    if array.null_count:
        array = pc.fill_null(array, MISSING)
    found: Ints = array.to_numpy(zero_copy_only=False)
    return found


def hashed(array: pa.Array) -> Ints:
    """(n,) int64 ids: the XXH64 of each value's text, as of `hash_ids`; `MISSING` where it is missing.

    An integer's text is its decimal form. Text of a dictionary is hashed once.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array, kind = _plain(array, encoded=True)
    if pa.types.is_dictionary(kind):
        return _of_dictionary(array)
    if pa.types.is_null(kind):
        return np.full(len(array), MISSING, np.int64)
    if pa.types.is_integer(kind):
        array, kind = pc.cast(array, pa.string()), pa.string()
    if not _is_text(kind):
        raise _no_ids(kind)
    offsets = _offsets(array, kind)
    ids = np.empty(len(array), np.int64)
    data = array.buffers()[2]
    _core.hash_ids(
        0 if data is None else data.address, offsets.ctypes.data, 0, len(ids), 0, ids.ctypes.data
    )
    ids[offsets[1:] == offsets[:-1]] = MISSING
    if array.null_count:
        ids[pc.is_null(array).to_numpy(zero_copy_only=False)] = MISSING
    return ids


def texts(array: pa.Array) -> list[str]:
    """Text of each value; "" where it is missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array, kind = _plain(array)
    if pa.types.is_nested(kind):
        raise BadValue(None, f"has the type {kind}; a key is text or a number.")
    text = _cast(array, pa.large_string(), "text in UTF-8")
    found: list[str] = pc.fill_null(text, "").to_pylist()
    return found


def bags_of(array: pa.Array, separator: str) -> tuple[pa.Array, Ints]:
    """(values, offsets): bag i has the values from offsets[i] to before offsets[i + 1].

    Lists of Arrow, or text that is cut at each `separator`, if that is not empty. A null is an empty bag;
    another value is a bag of one.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array, kind = _plain(array)
    if _is_text(kind) and separator:
        array = pc.split_pattern(array, pattern=separator)
        kind = array.type
    if not pa.types.is_list(kind) and pa.types.is_nested(kind):
        if not (pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            raise BadValue(None, f"has the type {kind}; bags are lists or text.")
    if not hasattr(kind, "value_type"):
        present = pc.is_valid(array).to_numpy(zero_copy_only=False)
        return array.drop_null(), _ends(present.astype(np.int64))
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return array.flatten(), _ends(lengths)


def _ends(lengths: NDArray[np.integer]) -> Ints:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _plain(array: pa.Array, encoded: bool = False) -> tuple[pa.Array, pa.DataType]:
    """The array without the wrapping of extension types, runs and views, and its type.

    Args:
        encoded: leave dictionaries as they are.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_run_end_encoded(kind):
        array = pc.run_end_decode(array)
    if pa.types.is_dictionary(kind) and not encoded:
        array = array.dictionary_decode()
    views = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
    fixed = pa.types.is_fixed_size_binary(array.type) and not pa.types.is_decimal(array.type)
    target = pa.binary() if fixed else views.get(str(array.type))
    if target is not None:
        array = pc.cast(array, target)
    return array, array.type


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_one = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in is_one)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _offsets(array: pa.Array, kind: pa.DataType) -> Ints:
    """(n + 1,) where the text of each value begins in the array's buffer of bytes."""
    import pyarrow as pa

    begin, count = array.offset, len(array) + 1
    buffer = array.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(count, np.int64)
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    width = np.dtype(np.int64 if large else np.int32)
    own = np.frombuffer(buffer, width, count, begin * width.itemsize)
    return own.astype(np.int64, copy=False)


def _of_dictionary(array: pa.Array) -> Ints:
    """Ids of a dictionary array, of which each value is hashed once."""
    import pyarrow.compute as pc

    known = hashed(array.dictionary)
    at = array.indices
    if at.null_count:
        known = np.append(known, MISSING)
        at = pc.fill_null(at.cast("int64"), len(known) - 1)
    positions: Ints = at.to_numpy(zero_copy_only=False)
    return known[positions]


def _integers_of_floats(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    # Integers of which some are missing are floats in pandas.
    found = array.to_numpy(zero_copy_only=False).astype(np.float64)
    missing = np.isnan(found)
    wrong = ~missing & ~((np.abs(found) < _EXACT) & (np.trunc(found) == found))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadValue(
            row,
            f"{float(found[row])!r} is no id: a float must be an integer below 2**53, as larger ones are "
            "rounded. Write the column as int64 or text.",
        )
    return pa.array(np.where(missing, 0, found).astype(np.int64), mask=missing)


def _numbers_of_text(array: pa.Array, target: pa.DataType, wanted: str) -> pa.Array:
    """Text as numbers of the type `target`, null where they are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = _cast(array, pa.large_string(), "text in UTF-8")
    try:
        return pc.cast(text, target)
    except pa.ArrowInvalid:
        pass  # some are empty, or written in a way that is less common
    text = pc.utf8_trim_whitespace(text)
    text = pc.if_else(pc.is_in(text, pa.array(_NULLS, text.type)), None, text)
    text = pc.replace_substring_regex(text, pattern=r"^\+", replacement="")
    if pa.types.is_integer(target):
        text = pc.replace_substring_regex(text, pattern=r"^(-?\d+)\.0*$", replacement=r"\1")
    try:
        return pc.cast(pc.cast(text, pa.bool_()), pa.uint8()).cast(target)
    except pa.ArrowInvalid:
        return _cast(text, target, wanted)


def _cast(array: pa.Array, target: pa.DataType, wanted: str) -> pa.Array:
    """The array cast without loss; BadValue with the first row that cannot be."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def cast(begin: int, count: int) -> pa.Array:
        return pc.cast(array.slice(begin, count), target)

    try:
        return cast(0, len(array))
    except pa.ArrowNotImplementedError:
        raise BadValue(None, f"has the type {array.type}, not {wanted}.") from None
    except pa.ArrowInvalid:
        row = _first_failure(len(array), cast)
        shown = repr(array[row].as_py() if _can_be_shown(array, row) else "its bytes")
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise BadValue(row, f"{shown} is not {wanted}.") from None


def _can_be_shown(array: pa.Array, row: int) -> bool:
    try:
        array[row].as_py()
    except ValueError:
        return False
    return True


def _no_ids(kind: pa.DataType) -> BadValue:
    import pyarrow as pa

    remedy = "Write the column as one of them."
    if pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        remedy = 'Declare it with values="int", or write it as text or int64.'
    elif pa.types.is_nested(kind):
        remedy = 'Lists of them are read by the kinds "ids" and "sequence".'
    return BadValue(None, f"has the type {kind}, and ids are text or integers. {remedy}")


def _first_failure(count: int, attempt: Callable[[int, int], object]) -> int:
    """The first of `count` elements with which ``attempt(begin, count)`` fails, by bisection."""
    import pyarrow as pa

    begin = 0
    while count > 1:
        half = count // 2
        try:
            attempt(begin, half)
        except pa.ArrowInvalid:
            count = half
        else:
            begin, count = begin + half, count - half
    return begin
