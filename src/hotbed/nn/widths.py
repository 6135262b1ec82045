"""Widths and counts of layers that a user gives."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.errors import TableError

__all__ = ["check_counts", "check_layers"]

_BELOW = 2**31


def check_counts(layer: str, **counts: object) -> None:
    """Raise TableError where one is no positive integer below 2^31. `layer`: whose they are."""
    for name, count in counts.items():
        if not _is_count(count):
            raise TableError(f"{layer}: {name} is {count!r}. Pass a positive integer.")


def check_layers(layer: str, layers: object) -> None:
    """Raise TableError where these are not the widths of one layer or more. `layer`: which they make."""
    if not isinstance(layers, Sequence) or not layers or not all(map(_is_count, layers)):
        raise TableError(
            f"{layer}: layers is {layers!r}. Pass a positive integer for each layer, as a list."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _BELOW
