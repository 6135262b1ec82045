"""Widths and counts of layers that a user gives."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.errors import TableError

__all__ = ["check_counts", "check_hidden", "check_layers"]

_BELOW = 2**31


def check_counts(layer: str, **counts: object) -> None:
    """Raise TableError where one is no positive integer below 2^31. `layer`: whose they are."""
    for name, count in counts.items():
        if not _is_count(count):
            raise TableError(f"{layer}: {name} is {count!r}. Pass a positive integer.")


def check_layers(layer: str, layers: object) -> None:
    """Raise TableError where these are not the widths of one layer or more. `layer`: which they make."""
    _check_widths(layer, "layers", layers, least=1)


def check_hidden(layer: str, hidden: object) -> None:
    """Raise TableError where these are not the widths of hidden layers, of which there may be none."""
    _check_widths(layer, "hidden", hidden, least=0)


def _check_widths(layer: str, name: str, widths: object, least: int) -> None:
    if not isinstance(widths, Sequence) or len(widths) < least or not all(map(_is_count, widths)):
        raise TableError(
            f"{layer}: {name} is {widths!r}. Pass a positive integer for each layer, as a list."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _BELOW
