"""Base of the settings of models: numbers that fix their shape, kept in checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable

from hotbed.arrays import integer, iterated
from hotbed.errors import TableError
from hotbed.text import brief

__all__ = ["LinearSettings", "ModelSettings"]

_MOST = 2**31


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Settings that all models have. A model adds its own in a subclass; lists become tuples.

    Fields declared as int, float, bool, str, or tuples of integers or texts, with or without ``| None``, take
    nothing else.

    Raises:
        TableError: a value is not of its field's type.
    """

    dim: int = 16
    """Width of the tables."""
    num_dense: int = 13
    """Columns of ``batch["dense"]``."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in ("dim", "num_dense"):  # which tables and models check
                continue
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, self._taken(field, value))

    @classmethod
    def from_text(cls, texts: Iterable[str]) -> dict[str, object]:
        """Return settings by name, of texts such as "layers=3", "hidden=256,128" or "one_row=true".

        Raises:
            TableError: a text is none of these, or its name is no setting's. The constructor refuses values
                of another type.
        """
        declared = {field.name: _text_of(field.type) for field in dataclasses.fields(cls)}
        settings: dict[str, object] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or name not in declared:
                raise TableError(
                    f"Setting {text!r}: write NAME=VALUE, the name one of {', '.join(declared)}."
                )
            settings[name] = _value_of(declared[name], value)
        return settings

    def _taken(self, field: dataclasses.Field[object], value: object) -> object:
        declared = _text_of(field.type)
        kind = declared.removesuffix(" | None")
        if kind not in _KINDS or (value is None and kind != declared):
            return tuple(value) if isinstance(value, list) else value
        take, expected = _KINDS[kind]
        taken = take(value)
        if taken is None:
            raise TableError(
                f"{type(self).__name__}: {field.name} is {brief(value)}. Pass {expected}."
            )
        return taken


@dataclasses.dataclass(frozen=True)
class LinearSettings(ModelSettings):
    """Settings of models with a linear part, in which ids have weights of their own."""

    one_row: bool = dataclasses.field(default=False, kw_only=True)
    """True if an id's weight lies in the row of its vector, as its last column (`hotbed.init.Columns`): one
    lookup an id, and one row with its states. False: in a table of its own, ``C1.wide`` beside ``C1``."""


def _text_of(declared: type | str) -> str:
    """The declared type of a field as it is written."""
    if isinstance(declared, str):
        return declared
    return declared.__name__ if type(declared) is type else str(declared)


def _value_of(declared: str, text: str) -> object:
    """The value that a text stands for, which may be of another type than the declared one."""
    if text == "none":
        return None
    if declared.startswith("tuple"):
        return [_value_of("", part) for part in text.split(",") if part]
    if text in ("true", "false"):
        return text == "true"
    for kind in () if declared == "str" else (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _integer(value: object) -> int | None:
    """None also beyond what sizes of layers can be: their products stay within what torch can count."""
    given = integer(value)
    return given if given is not None and abs(given) < _MOST else None


def _number(value: object) -> float | None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        given = float(value)
    except OverflowError:  # of an integer
        return None
    return given if math.isfinite(given) else None


def _truth(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _each(take: Callable[[object], object]) -> Callable[[object], tuple[object, ...] | None]:
    def taken(values: object) -> tuple[object, ...] | None:
        given = None if isinstance(values, str) else iterated(values)
        each = None if given is None else tuple(map(take, given))
        return None if each is None or None in each else each

    return taken


_KINDS: dict[str, tuple[Callable[[object], object], str]] = {
    "int": (_integer, "an integer below 2**31"),
    "float": (_number, "a finite number"),
    "bool": (_truth, "True or False"),
    "str": (_text, "a text"),
    "tuple[int, ...]": (_each(_integer), "a list of integers below 2**31, such as [256, 128]"),
    "tuple[str, ...]": (_each(_text), "a list of names, such as ['item']"),
}
"""Function that returns a value as a field takes it, or None; and a description of such values."""
