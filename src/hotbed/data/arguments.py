"""Options that readers and generators are given, checked before anything is read or made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Generic, Literal, SupportsFloat, SupportsIndex, TypeVar, overload

import numpy as np

from hotbed.arrays import integer
from hotbed.errors import InputError
from hotbed.text import brief

__all__ = [
    "Checked",
    "flag",
    "labels_of",
    "one_or_more",
    "real",
    "row_range",
    "seed_of",
    "seed_or_none",
    "whole",
    "whole_or_none",
    "window",
]

_T = TypeVar("_T")

_MOST = 2**63 - 1
_SHUFFLE_WINDOW = 65_536


class Checked(Generic[_T]):
    """A field of a class whose values are checked whenever it is set, also after construction."""

    def __init__(self, check: Callable[..., _T]) -> None:
        """`check`: returns what is kept of a value, by the field's name, or raises."""
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Checked[_T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...

    def __get__(self, instance: object, owner: type) -> Checked[_T] | _T:
        if instance is None:
            return self
        try:
            kept: _T = vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        return kept

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self._name] = self._check(self._name, value)


def whole(name: str, value: object, least: int = 0) -> int:
    """The value of that name as an int of at least `least`; raises InputError where it is none."""
    given = integer(value)
    if given is None or not least <= given <= _MOST:
        raise InputError(
            f"{name} is {brief(value)}; it must be an integer, at least {least} and below 2**63."
        )
    return given


def real(name: str, value: object) -> float:
    """The value of that name as a float; raises InputError where it is no real number."""
    try:
        if isinstance(value, (SupportsFloat, SupportsIndex)) and not isinstance(value, bool):
            given = float(value)
            if not math.isnan(given):
                return given
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise InputError(f"{name} is {brief(value)}; it must be a number.")


def one_or_more(name: str, value: object) -> int:
    """Do as `whole` with a `least` of 1."""
    return whole(name, value, 1)


def whole_or_none(name: str, value: object) -> int | None:
    """Do as `whole`, or return None."""
    return None if value is None else whole(name, value)


def flag(name: str, value: object) -> bool:
    """The value of that name as a bool; raises InputError where it is none."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise InputError(f"{name} is {brief(value)}; it must be True or False.")


def seed_of(value: object) -> int:
    """The value of a seed; raises InputError where it is no integer of 64 bits."""
    given = integer(value)
    if given is None or not 0 <= given < 2**64:
        raise InputError(f"seed must be an integer in [0, 2**64), got {brief(value)}.")
    return given


def seed_or_none(name: str, value: object) -> int | None:
    """Do as `seed_of`, or return None."""
    return None if value is None else seed_of(value)


def labels_of(name: str, value: object) -> bool | Literal["auto"]:
    """Return whether rows have labels; raises InputError for anything but a bool or "auto"."""
    if value == "auto" and isinstance(value, str):
        return "auto"
    if isinstance(value, bool):
        return value
    raise InputError(f"{name} is {brief(value)}; it must be True, False or 'auto'.")


def window(name: str, shuffle: object) -> int:
    """Rows that are shuffled at a time, 0: none; raises InputError where `shuffle` is no such number."""
    if isinstance(shuffle, bool):
        return _SHUFFLE_WINDOW if shuffle else 0
    rows = integer(shuffle)
    if rows is None or not 0 <= rows < 2**63:
        raise InputError(
            f"{name} is {brief(shuffle)}; it must be a number of rows below 2**63, or a bool."
        )
    return rows


def row_range(rows: object, count: Callable[[], int]) -> tuple[int, int | None]:
    """(begin, end) of a slice or pair of rows; an end of None: the last row.

    Args:
        count: returns the number of all rows; called where `rows` counts from the end.

    Raises:
        InputError: no such range.
    """
    if rows is None:
        return 0, None
    part = rows if isinstance(rows, slice) else _slice(rows)
    if part.step not in (None, 1):
        raise InputError(f"rows has step {part.step}; only ranges of rows can be read.")
    start, stop = (None if at is None else integer(at) for at in (part.start, part.stop))
    for given, at in ((part.start, start), (part.stop, stop)):
        if given is not None and (at is None or not -(2**63) <= at < 2**63):
            raise InputError(
                f"rows begin or end with {brief(given)}; they are numbers of rows, below 2**63."
            )
    if min(start or 0, stop or 0) < 0:
        start, stop, _ = slice(start, stop).indices(count())
    start = start or 0
    return start, None if stop is None else max(start, stop)


def _slice(rows: object) -> slice:
    try:
        begin, end = rows if isinstance(rows, Iterable) else ()
    except (TypeError, ValueError):
        raise InputError(f"rows is {brief(rows)}; give (begin, end), or a slice.") from None
    return slice(begin, end)
