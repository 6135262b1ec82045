"""`hash_ids`: ids of strings, bytes and integers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed import _core
from hotbed.arrays import describe
from hotbed.data.arguments import seed_of
from hotbed.errors import InputError

__all__ = ["hash_ids"]


def hash_ids(values: object, *, seed: int = 0) -> Tensor:
    """int64 ids of strings, bytes or integers, for tables that take any id (``rows=None``).

    >>> ids = hb.data.hash_ids(["Lyon", "Oslo", "Lyon"])
    >>> rows = hb.data.hash_ids(["Lyon", "Oslo"]) % 1_000_000        # for a static table of that many rows

    An id is the XXH64 hash of a value's bytes, read as a two's complement number. A string's bytes are
    its UTF-8 form, so ``"a"`` and ``b"a"`` have the same id; an integer's are its lowest 8, the least
    significant first, whatever type it is stored in. The same values have the same ids in every process,
    on every platform and in every version of Hotbed.

    Among n different values about n² / 2⁶⁵ pairs share an id: none is to be expected among 10⁸ values
    (odds of 1 in 3,700), one among 6 · 10⁹. The hash is no defence against somebody who looks for
    collisions on purpose. Tables know nothing of one another's ids, so one seed serves all features.
    A `CriteoLog` hashes nothing: the ids of its text are those of `criteo_ids`.

    Args:
        values: a string, bytes or an integer, (nested) lists of them, or an array: NumPy's of strings,
            bytes, integers or objects, a pandas or Arrow column, a tensor of integers. NumPy's own
            strings end before trailing NULs.
        seed: another number gives other ids, 0 <= seed < 2**64.

    Returns:
        int64 on the host, of the shape of `values`.

    Raises:
        InputError: a missing value (None, NaN), a float, a bool, lists of different lengths, an integer
            outside [-2**63, 2**64).
    """
    seed = seed_of(seed)
    if hasattr(values, "__array__"):
        values = _array_of(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        data, offsets, shape = _little_endian(values), None, values.shape
    else:
        try:
            flat, shape = _flattened(values)
        except RecursionError:
            raise InputError("hash_ids: lists in lists in lists, without end.") from None
        data, offsets = _bytes_of(flat)
    ids = torch.empty(shape, dtype=torch.int64, device="cpu")
    starts = 0 if offsets is None else offsets.ctypes.data
    _core.hash_ids(data.ctypes.data, starts, 8, ids.numel(), seed, ids.data_ptr())
    return ids


def _array_of(values: object) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        raise InputError(
            "hash_ids: a masked array has values missing; give .compressed() or .filled(x)."
        )
    if isinstance(values, Tensor):
        if values.layout is not torch.strided or values.is_nested or values.is_meta:
            raise InputError(f"hash_ids: a tensor must be dense, got {describe(values)}.")
        values = values.detach().resolve_neg().cpu()
    return np.asarray(values)


def _little_endian(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, "<i8" if array.dtype.kind == "i" else "<u8")


def _flattened(values: object) -> tuple[Sequence[Any], tuple[int, ...]]:
    """The strings, bytes and integers in lists and arrays, and the shape that they are in."""
    if hasattr(values, "__array__"):
        array = _array_of(values)
        if array.dtype != object or array.ndim != 1:
            return array.ravel().tolist(), array.shape
        values = array.tolist()  # an Arrow column of lists comes as objects
    if not isinstance(values, (list, tuple)):
        return [values], ()
    if set(map(type, values)) <= {str, bytes, int}:
        return values, (len(values),)
    parts = [_flattened(value) for value in values]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        raise InputError(
            "hash_ids: lists of different lengths; give the values of all in one list, and "
            "hotbed.Jagged(ids, lengths=...) of what comes back."
        )
    return [value for flat, _ in parts for value in flat], (len(values), *shapes.pop())


def _bytes_of(
    values: Sequence[Any],
) -> tuple[np.ndarray, np.ndarray | None]:
    """The bytes of all values behind one another, and where each begins and ends; None: 8 bytes each."""
    kinds = set(map(type, values))
    if kinds == {int}:
        with contextlib.suppress(OverflowError):
            return _little_endian(np.array(values, np.int64)), None
    pieces = values
    if kinds == {str} and (text := "".join(values)).isascii():
        data = text.encode()
    else:
        if kinds != {bytes}:
            pieces = [_encoded(at, value) for at, value in enumerate(values)]
        data = b"".join(pieces)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, pieces), np.int64, len(values)), out=offsets[1:])
    return np.frombuffer(data or bytes(1), np.uint8), offsets


def _encoded(at: int, value: object) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"hash_ids: value {at}, {value!r}, has no UTF-8 form; give the bytes it was read from."
            ) from None
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if -(2**63) <= value < 2**64:
            return (int(value) % 2**64).to_bytes(8, "little")
        raise InputError(f"hash_ids: value {at}, {value}, is outside [-2**63, 2**64).")
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        raise InputError(
            f"hash_ids: value {at} is missing ({value!r}). Fill missing values first, with '' for example."
        )
    raise InputError(
        f"hash_ids: value {at} is {describe(value)}; give strings, bytes or integers. (Integers of which "
        "some are missing are floats in NumPy; fill them first.)"
    )
