"""Which tensors of a ``state_dict`` are tables."""

from __future__ import annotations

from collections.abc import Mapping

from hotbed.formats.tables import Array, Found, fault_of, table_of
from hotbed.table.state_dict import ENDINGS

__all__ = ["found_in"]


def found_in(path: str, tensors: Mapping[str, Array], others: Mapping[str, str]) -> Found:
    """The tables among the tensors of a file.

    Args:
        others: of what is no tensor, by name: why it is skipped.

    Raises:
        FormatError: ids are not those of their rows.
    """
    tables, skipped = [], dict(others)
    for name, tensor in tensors.items():
        if any(name.endswith(end) and name.removesuffix(end) in tensors for end in ENDINGS[1:]):
            continue
        ids = tensors.get(f"{name}.ids")
        if fault := fault_of(tensor, static=ids is None):
            skipped[name] = fault
        else:
            tables.append(table_of(path, name, tensor, ids, _unasked(name, tensors)))
    return Found(tables, skipped)


def _unasked(name: str, tensors: Mapping[str, Array]) -> str:
    if any(name + ending in tensors for ending in ENDINGS[1:]):
        return ""  # as Hotbed's own tables
    *_, last = name.split(".")
    if last != "weight":
        return "is not named like the weight of a layer"
    bias = f"{name.removesuffix('weight')}bias"
    return f"looks like a linear layer's, as there is {bias}" if bias in tensors else ""
