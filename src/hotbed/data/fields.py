"""Fields of kinds of columns, checked as they are given."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

from hotbed.arrays import integer
from hotbed.errors import HotbedError
from hotbed.text import brief

__all__ = [
    "SchemaError",
    "choice",
    "fraction",
    "name_or_none",
    "names",
    "nearest",
    "number_or_none",
    "text",
]


class SchemaError(HotbedError, ValueError):
    """A schema of data that cannot be honoured; the message names the column and the key."""


def choice(key: str, value: object, known: Sequence[str]) -> None:
    """Raise SchemaError where the value is none of those known."""
    if value not in known:
        near = nearest(value, known)
        raise SchemaError(f"{key} is {brief(value)}; {near}")


def nearest(value: object, known: Iterable[str]) -> str:
    """A remedy for a name that is not known."""
    names = list(known)
    near = difflib.get_close_matches(value, names, 1) if isinstance(value, str) else []
    return f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(names)}."


def fraction(key: str, value: object, above: float = -math.inf) -> None:
    """Raise SchemaError where the value is no finite number above a bound."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and isinstance(value, int | float) and above < value < math.inf):
        bound = "" if above == -math.inf else f" above {above:g}"
        raise SchemaError(f"{key} is {brief(value)}; it must be a finite number{bound}.")


def number_or_none(key: str, value: object, *, required: bool = False) -> int | None:
    """Return the value; raises SchemaError where it is neither an integer of at least 1 nor None."""
    given = integer(value)
    if (value is not None or required) and (given is None or not 0 < given < 2**62):
        raise SchemaError(
            f"{key} is {brief(value)}; it must be an integer, at least 1 and below 2**62."
        )
    return given


def name_or_none(key: str, value: object) -> None:
    """Raise SchemaError where the value is neither a string of at least a character nor None."""
    if value is not None and (not isinstance(value, str) or not value):
        raise SchemaError(f"{key} is {brief(value)}; it must be a string that is not empty.")


def text(key: str, value: object) -> None:
    """Raise SchemaError where the value is no string."""
    if not isinstance(value, str):
        raise SchemaError(f"{key} is {brief(value)}; it must be a string.")


def names(key: str, value: object, count: int) -> tuple[str, ...]:
    """The value as a tuple of `count` names; raises SchemaError where it is no list of them."""
    given = tuple(value) if isinstance(value, list | tuple) else ()
    if len(given) != count or not all(isinstance(name, str) for name in given):
        raise SchemaError(f"{key} is {brief(value)}; it must be a list of {count} names.")
    return given
