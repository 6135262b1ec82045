"""Inputs of many features in one object, such as a KeyedJaggedTensor."""

from __future__ import annotations

import operator

from torch import Tensor

from hotbed.arrays import is_array
from hotbed.errors import InputError
from hotbed.inputs.bags import checked_offsets, has_methods
from hotbed.jagged import Jagged

__all__ = ["split_keyed"]


def split_keyed(value: object) -> dict[str, Jagged] | None:
    """A KeyedJaggedTensor-like object (keys(), values(), offsets(), feature after feature) as a dict.

    None where `value` is no such thing.

    Raises:
        InputError: keys, offsets and values that do not go together.
    """
    if not has_methods(value, "keys", "values", "offsets"):
        return None
    values = value.values()
    if not isinstance(values, Tensor) and not is_array(values):
        return None
    keys, offsets = list(value.keys()), value.offsets()
    weights = getattr(value, "weights_or_none", lambda: None)()
    if len(set(keys)) != len(keys):
        raise InputError(f"A keyed input has a key twice: {', '.join(map(repr, keys))}.")
    if getattr(value, "variable_stride_per_key", lambda: False)():
        strides: list[int] = operator.methodcaller("stride_per_key")(value)
        sizes = zip(keys, strides, strict=True)
        raise InputError(
            "A keyed input has batches of different sizes: "
            f"{', '.join(f'{size} of {key!r}' for key, size in sizes)}. All keys must have as many "
            "samples; look those of other sizes up in a collection of their own."
        )
    offsets = checked_offsets("A keyed input", offsets)
    if offsets.is_meta:
        raise InputError(
            "A keyed input has its offsets on meta, without data, so it cannot be split by key. Make it "
            "where the tables are."
        )
    if not keys or (len(offsets) - 1) % len(keys):
        raise InputError(
            f"A keyed input has {len(keys)} keys and {len(offsets) - 1} lengths; every key must have "
            "as many, one a sample."
        )
    batch = (len(offsets) - 1) // len(keys)
    edges = offsets[::batch].tolist() if batch else [int(offsets[0])] * (len(keys) + 1)
    if edges[0] != 0 or edges[-1] != len(values):
        raise InputError(
            f"Feature {keys[-1 if edges[0] == 0 else 0]!r}: the offsets of a keyed input must run "
            f"from 0 to {len(values)}, the number of values; they run from {edges[0]} to {edges[-1]}."
        )
    parts = {}
    for i, (key, begin, end) in enumerate(zip(keys, edges[:-1], edges[1:], strict=True)):
        if not 0 <= begin <= end <= len(values):
            raise InputError(
                f"Feature {key!r}: offsets run from {begin} to {end}, with {len(values)} values."
            )
        own = offsets[i * batch : (i + 1) * batch + 1]
        own_weights = None if weights is None else weights[begin:end]
        parts[key] = Jagged(values[begin:end], own - begin, weights=own_weights)
    return parts
