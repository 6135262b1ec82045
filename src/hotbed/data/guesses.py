"""A schema that is guessed from statistics of columns, to be looked over by somebody who knows them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from hotbed.data.columns import KINDS, Column, Id, Ids, Key, Label, Number, Sequence
from hotbed.data.schema import Schema
from hotbed.data.statistics import ColumnStatistics

__all__ = ["Guess", "guess", "refreshed", "schema_of"]

_LABELS = frozenset(
    "label labels target y click clicked clicks conversion converted purchase purchased like liked "
    "is_click is_clicked bought rating".split()
)
_ID_WORDS = frozenset(
    "id ids uid gid sku code category cat type kind class zip zipcode postcode device country region city "
    "brand store shop user item movie product genre genres channel os browser language lang site page".split()
)
_SEQUENCE_WORDS = frozenset("history hist sequence seq recent last previous watched viewed".split())
_SHARED = frozenset(kind.key for kind in KINDS.values() if kind.key is not None)
"""Entries of a batch that belong to kinds, and are no names for other columns."""
_KEY_ROWS = 100
"""Rows from which on a column whose values all differ is a key."""
_LONG_TAIL = 10.0
"""Multiple of the mean that the largest of positive numbers exceeds where their logarithm is better."""
_LONGEST_SEQUENCE = 50


class Guess(NamedTuple):
    """The kind of a column; None: it is of no use, for the reason."""

    kind: Column | None
    reason: str


def guess(column: ColumnStatistics, label_found: bool = False) -> Guess:
    """Return the kind that a column seems to be.

    Args:
        label_found: another column is the label already.
    """
    found = _by_values(column, label_found)
    if found.kind is None or column.name not in ("", *_SHARED):
        return found
    if found.kind.key == column.name:
        return found
    return Guess(None, f"rename it, {column.name!r} is taken" if column.name else "it has no name")


def _by_values(column: ColumnStatistics, label_found: bool) -> Guess:
    words = _words(column.name)
    if column.is_unreadable:
        return Guess(None, f"{column.arrow_type} is not read")
    if column.missing == column.rows:
        return Guess(None, "no values")
    if column.separator is not None:
        if column.separator == "" and column.is_numeric and not column.is_integral:
            return Guess(None, "lists of fractions")
        values = "int" if column.is_integral and column.separator == "" else "hash"
        separator = column.separator or "|"
        if words & _SEQUENCE_WORDS:
            length = max(1, min(column.longest, _LONGEST_SEQUENCE))
            return Guess(Sequence(length, separator, values=values), "lists, named as a history")
        return Guess(Ids(separator, values=values), "lists")
    binary = column.is_integral and 0 <= column.low and column.high <= 1
    named = bool(words & _LABELS) or column.name.lower() in _LABELS
    if binary and named and not label_found and not column.missing:
        return Guess(Label(), "0 or 1, named as a label")
    if column.distinct == 1:
        return Guess(None, "one value only")
    whole = column.is_integral or not column.is_numeric
    filled = column.rows - column.missing
    if whole and column.is_exact and column.distinct == filled >= _KEY_ROWS:
        return Guess(Key(), "all values differ")
    if not column.is_numeric:
        return Guess(Id(), "text")
    if column.is_integral and not binary and _is_named_as_id(words):
        return Guess(Id(values="int"), "integers, named as ids")
    return _number(column)


def _number(column: ColumnStatistics) -> Guess:
    if column.low >= 0 and column.high > _LONG_TAIL * max(column.mean, 1e-9) and column.high > 1:
        return Guess(Number("log"), "numbers with a long tail")
    if 0 <= column.low and column.high <= 1 or column.std == 0:
        return Guess(Number(), "numbers from 0 to 1")
    if not math.isfinite(column.std):
        return Guess(Number("log"), "numbers too large for a deviation")
    return Guess(Number("standard", mean=_short(column.mean), std=_short(column.std)), "numbers")


def _short(value: float) -> float:
    """Six digits of a number."""
    return float(f"{value:.6g}")


def _words(name: str) -> frozenset[str]:
    """Lower-case words of a name such as userId, user_id or "User ID"."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return frozenset(re.split(r"[\W_\d]+", spaced.lower()))


def _is_named_as_id(words: frozenset[str]) -> bool:
    return bool(words & _ID_WORDS) or "c" in words  # Criteo's columns are C1 to C26


def schema_of(guesses: Iterable[tuple[str, Guess]]) -> Schema:
    """Return the schema of the columns that have a kind; raises SchemaError where none has."""
    return Schema({name: found.kind for name, found in guesses if found.kind is not None})


def refreshed(column: Column, statistics: ColumnStatistics) -> Column:
    """Return the kind of a column with the mean and deviation that it has, if it needs them."""
    if (
        isinstance(column, Number)
        and column.transform == "standard"
        and 0 < statistics.std < math.inf
    ):
        return Number(
            "standard",
            missing=column.missing,
            mean=_short(statistics.mean),
            std=_short(statistics.std),
        )
    return column
