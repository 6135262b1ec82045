"""States of optimizers, schedulers, loaders and random generators as JSON beside tensors. No pickle.

Plain values are JSON's own; what JSON has not is an object with one entry that names its kind:
``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"Counter": ...}``, ``{"OrderedDict": ...}``,
``{"float": "inf"}``, ``{"tensor": name}``, ``{"array": name}`` (a NumPy array), ``{"dtype": "float32"}``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.tensors import DTYPES
from hotbed.files import Json

__all__ = ["Saveable", "Stateful", "decoded", "encoded"]


class Saveable(Protocol):
    """An optimizer, scheduler or loader whose state can be saved."""

    def state_dict(self) -> Mapping[str, object]: ...


class Stateful(Saveable, Protocol):
    """One whose state can be loaded, too."""

    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


_ARRAYS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_MOST_DEEP = 100
_MOST_BITS = 10_000
"""Python reads and writes no decimal of more than 4,300 digits."""
_DICTS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}


def encoded(value: object, name: str, tensors: dict[str, Tensor], depth: int = 0) -> Json:
    """A value as JSON values. Tensors and arrays in it are added to `tensors`.

    Args:
        name: what errors call it, and the names of its tensors begin with.
        depth: how many lists, tuples and dicts it lies in.

    Raises:
        CheckpointError: it has a part of another type, which is named, or one that could not be read again.
    """
    if depth > _MOST_DEEP:
        raise CheckpointError(
            f"{name[:80]}... lies in more than {_MOST_DEEP} lists, tuples and dicts, or one holds itself."
        )
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        if value.bit_length() > _MOST_BITS:
            raise CheckpointError(f"{name} is an integer of more than {_MOST_BITS:,} bits.")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    deeper = depth + 1
    if isinstance(value, list):
        return [encoded(v, f"{name}.{at}", tensors, deeper) for at, v in enumerate(value)]
    if type(value) is tuple:
        items = [encoded(v, f"{name}.{at}", tensors, deeper) for at, v in enumerate(value)]
        return {"tuple": items}
    if isinstance(value, Mapping):
        kind = next((k for k, t in _DICTS.items() if type(value) is t), "dict")
        pairs: list[Json] = [
            [
                encoded(k, f"{name} (a key)", tensors, deeper),
                encoded(v, f"{name}.{k}", tensors, deeper),
            ]
            for k, v in value.items()
        ]
        return {kind: pairs}
    if isinstance(value, Tensor) and value.device.type == "meta":
        raise CheckpointError(f"{name} is on the device meta, which has no numbers to save.")
    if isinstance(value, Tensor) and value.layout is torch.strided:
        if value.dtype not in DTYPES.values():  # before rows are written
            raise CheckpointError(
                f"{name} has the dtype {value.dtype}, which a checkpoint cannot hold."
            )
        return {"tensor": _added(value.detach(), name, tensors)}
    if _is_plain(value):
        made = torch.from_numpy(_as_torch_has(value))
        return {"array": _added(made, name, tensors), "dtype": value.dtype.str}
    if isinstance(value, np.integer | np.floating | np.bool_):
        plain = value.item()
        if not isinstance(plain, np.generic):
            return encoded(plain, name, tensors)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        kind = str(value.layout).removeprefix("torch.")
        raise CheckpointError(f"{name} is of type {kind} tensor, which a checkpoint cannot hold.")
    raise CheckpointError(
        f"{name} is of type {type(value).__qualname__}, which a checkpoint cannot hold: it has numbers, "
        "strings, tensors, NumPy arrays of numbers, and lists, tuples and dicts of those."
    )


def _is_plain(value: object) -> TypeGuard[np.ndarray]:
    """Return True for an array of numbers without a mask."""
    return (
        isinstance(value, np.ndarray)
        and not isinstance(value, np.ma.MaskedArray)
        and value.dtype.str[1:] in _ARRAYS
        and value.dtype.isnative
    )


def _added(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Its name, under which there is no other."""
    free, number = name, 1
    while free in tensors:
        number += 1
        free = f"{name}#{number}"
    tensors[free] = tensor
    return free


def _as_torch_has(array: np.ndarray) -> np.ndarray:
    """Return an array of a dtype that safetensors has: unsigned ones as the bits of signed ones."""
    dense: np.ndarray = array.copy(order="C")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        dense = dense.view(f"i{array.dtype.itemsize}")
    return dense


def decoded(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `encoded` was given.

    Raises:
        ValueError: no `encoded` has made it.
    """
    if isinstance(value, list):
        return [decoded(item, tensors) for item in value]
    match value:
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decoded(item, tensors) for item in items)
        case {"float": ("inf" | "-inf" | "nan") as text, **rest} if not rest:
            return float(text)
        case {"tensor": str(name), **rest} if not rest and name in tensors:
            return tensors[name]
        case {"array": str(name), "dtype": str(dtype), **rest} if not rest and name in tensors:
            array = tensors[name].numpy()
            if dtype[1:] not in _ARRAYS or np.dtype(dtype).itemsize != array.itemsize:
                raise ValueError(f"the array {name!r} is not of {dtype}")
            return array.view(dtype).copy()
        case {"dtype": str(name), **rest} if not rest:
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
        case dict() if len(value) == 1:
            ((kind, pairs),) = value.items()
            if kind in _DICTS and isinstance(pairs, list):
                return _DICTS[kind]({decoded(k, tensors): decoded(v, tensors) for k, v in pairs})
        case None | bool() | int() | float() | str():
            return value
    raise ValueError(f"{str(value)[:80]!r} is no value of a checkpoint")
