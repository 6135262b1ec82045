"""Numbers of any kind, and NumPy arrays and lists in place of tensors, that a user gives."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from hotbed.errors import InputError

__all__ = [
    "ID_DTYPES",
    "describe",
    "id_tensor",
    "integer",
    "is_array",
    "is_dense",
    "is_one_of",
    "iterated",
    "real_tensor",
]

ID_DTYPES = (torch.int64, torch.int32)


def integer(value: object) -> int | None:
    """`value` as an int; None where it is none (bool and float are none, numpy's integers are)."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # the latter of tensors without data
        return None


def iterated(value: object) -> Iterator[Any] | None:
    """Return an iterator over `value`; None where there is none, as of numbers and 0-d tensors."""
    try:
        return iter(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        return None


def is_one_of(value: object, choices: Sequence[object]) -> bool:
    """Return True if `value` is one of the choices. Arrays, which compare by element, are none."""
    return isinstance(value, Hashable) and value in choices


def is_dense(tensor: Tensor) -> bool:
    """Return True if the tensor is neither sparse, nested nor quantized; it may be on meta."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def is_array(value: object) -> bool:
    """Whether `value` is no tensor, but something that NumPy makes an array of."""
    if isinstance(value, Tensor):
        return False
    return isinstance(value, (Sequence, int)) or hasattr(value, "__array__")


def id_tensor(where: str, value: object, what: str = "ids") -> Tensor:
    """Ids (or offsets) as a dense tensor: tensors as they are, arrays and (nested) lists as
    ``torch.as_tensor`` makes them.

    int64 and int32 arrays share their memory with the tensor if they can be written to; others are
    copied. Lists of ints become int64. Other dtypes are refused here as they are in tensors.

    Args:
        where: begins the message, such as "Feature 'watched'".

    Raises:
        InputError: what is no array of int64 or int32.
    """
    if isinstance(value, Tensor):
        if value.dtype in ID_DTYPES:
            return _dense(where, what, value)
        dtype = str(value.dtype).removeprefix("torch.")
        raise InputError(
            f"{where}: {what} must be int64 or int32, got {dtype}; convert them with .long()."
        )
    array = _array(where, value)
    if array.size == 0:
        array = array.astype(np.int64)  # NumPy takes an empty list for floats
    if array.dtype.kind != "i" or array.itemsize not in (4, 8):
        raise _not_ids(f"{where}: {what} must be", array)
    return _shared(array)


def real_tensor(where: str, what: str, value: object) -> Tensor:
    """Weights or rows as a dense tensor of real numbers, of tensors, arrays and lists.

    Raises:
        InputError: what is none.
    """
    if isinstance(value, Tensor):
        tensor = _dense(where, what, value)
        if not tensor.is_complex():
            return tensor
    elif is_array(value):
        array = _array(where, value)
        if array.dtype.kind in "fiub" and array.itemsize <= 8:
            return _shared(array)
    raise InputError(f"{where}: {what} must be real numbers, got {describe(value)}.")


def _dense(where: str, what: str, tensor: Tensor) -> Tensor:
    if not is_dense(tensor) or tensor.is_meta:
        raise InputError(
            f"{where}: {what} must be a dense tensor with data, got {describe(tensor)}."
        )
    return tensor.resolve_neg()


def _array(where: str, value: object) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(
            f"{where}: a masked array has elements that mean nothing; give .compressed() or .filled(id)."
        )
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if "inhomogeneous" in str(error):
            raise InputError(
                f"{where}: lists of different lengths are no array; bags of them are "
                "hotbed.Jagged.from_lists(lists)."
            ) from None
        raise InputError(f"{where}: got {describe(value)}, of which NumPy says: {error}") from None


def _shared(array: np.ndarray) -> Tensor:
    # torch reads no other arrays, or warns of them. C's long long is another type of NumPy's than long.
    dtype = np.dtype(array.dtype.str).newbyteorder("=")
    array = np.require(array, dtype, ["C", "ALIGNED", "WRITEABLE"])
    return torch.from_numpy(array)


def _not_ids(must_be: str, array: np.ndarray) -> InputError:
    """The error for an array that is neither int64 nor int32."""
    for element in array.flat if array.dtype.kind in "OSTUu" else ():
        if isinstance(element, (str, bytes)):
            text = element.item() if isinstance(element, np.generic) else element
            return InputError(
                f"{must_be} integers, got the string {text!r}. hotbed.data.hash_ids(values) makes ids "
                "of strings, hotbed.data.criteo_ids(values) those of a CriteoLog."
            )
        if not isinstance(element, (int, np.integer)):
            return InputError(f"{must_be} int64 or int32, got {describe(element)}.")
        if not -(2**63) <= element < 2**63:
            return InputError(f"{must_be} int64 or int32, got {element}.")
    return InputError(
        f'{must_be} int64 or int32, got {array.dtype}; convert them with .astype("int64").'
    )


def describe(value: object) -> str:
    """Return what a value is, for an error message."""
    if isinstance(value, Tensor):
        layout = "" if value.layout is torch.strided else f"{value.layout} "
        kind = layout.removeprefix("torch.") + str(value.dtype).removeprefix("torch.")
        article = "an" if kind.startswith("int") else "a"
        return f"{article} {kind} tensor of shape {tuple(value.shape)}"
    if value is None:
        return "None"
    try:
        return f"{type(value).__name__} {value!r}"[:80]
    except RecursionError:
        return f"{type(value).__name__} of too many levels"
