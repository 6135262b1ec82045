"""Columns as JSON has them as batches: each value is encoded as the same value of a file is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from hotbed import _core
from hotbed.data.arrow_values import BadValue
from hotbed.data.blocks import Builder
from hotbed.data.columns import Ids, Pair, Source
from hotbed.data.columns import Sequence as History
from hotbed.data.criteo_lines import CATEGORIES, COLUMNS, DENSE, WANTED, Batch, Block
from hotbed.data.schema import Schema
from hotbed.files import Json
from hotbed.text import brief

__all__ = ["Columns", "CriteoColumns", "RecordError", "SchemaColumns"]

_LONGEST = 256
"""Characters of a value of a click log, far more than any that is valid."""


class RecordError(Exception):
    """A value that its column cannot have.

    Attributes:
        row: counts from 0; None: all values of the column are of a wrong type.
    """

    def __init__(self, column: str, row: int | None, text: str) -> None:
        super().__init__(f"{column}: {text}")
        self.column, self.row, self.text = column, row, text


class Columns(ABC):
    """Columns of which entries of a batch are made."""

    needed: Mapping[str, tuple[str, ...]]
    """By name, the types that a value has in JSON."""
    optional: Collection[str] = ()
    """Columns of the data that these entries are not made of."""
    separators: Mapping[str, str] = {}
    """Of those whose values are lists, what cuts text into them; "": nothing does."""

    @abstractmethod
    def batch(self, values: Mapping[str, Sequence[Json]], rows: int) -> Batch:
        """Return the entries of a batch.

        Args:
            values: of each column that is `needed`, `rows` of them.

        Raises:
            RecordError: a column cannot have a value.
        """


class SchemaColumns(Columns):
    """Columns of a schema, encoded as `hotbed.data.open` does.

    Args:
        entries: of a batch, which are wanted.

    Raises:
        KeyError: the schema makes no such entry.
        ImportError: pyarrow is missing.
    """

    def __init__(self, schema: Schema, entries: Collection[str]) -> None:
        import pyarrow  # noqa: F401

        self._all = schema.columns
        made = {name: column.key or name for name, column in schema.columns.items()}
        for entry in entries:
            if entry not in made.values():
                raise KeyError(entry)
        wanted = [name for name, entry in made.items() if entry in entries]
        # Pairs last, as what is wrong in one of their columns is better told of that one.
        self._made = sorted(wanted, key=lambda name: isinstance(self._all[name], Pair))
        reads = dict.fromkeys(read for name in self._made for read in self._all[name].reads(name))
        self.needed = {name: self._all[name].json_types for name in reads}
        self.separators = {
            name: column.separator
            for name, column in self._all.items()
            if name in reads and isinstance(column, Ids | History)
        }
        self.optional = [
            name
            for name, column in schema.columns.items()
            if name not in reads and not isinstance(column, Pair)
        ]

    def batch(self, values: Mapping[str, Sequence[Json]], rows: int) -> Batch:
        arrays = {}
        for name in self.needed:
            try:
                arrays[name] = self._all[name].array(values[name])
            except BadValue as wrong:
                raise RecordError(name, wrong.row, wrong.text) from None
        source, builder = Source(arrays, self._all), Builder(rows)
        for name in self._made:
            try:
                self._all[name].add(name, source, builder)
            except BadValue as wrong:
                raise RecordError(name, wrong.row, wrong.text) from None
        return builder.block().batch(0, rows)


class CriteoColumns(Columns):
    """Columns of a click log, encoded as `CriteoLog` does.

    Args:
        entries: of a batch, which are wanted.

    Raises:
        KeyError: a click log has no such entry.
    """

    def __init__(self, entries: Collection[str]) -> None:
        for entry in entries:
            if entry not in ("dense", *CATEGORIES):
                raise KeyError(entry)
        numbers = DENSE if "dense" in entries else ()
        wanted = [*numbers, *(name for name in CATEGORIES if name in entries)]
        self._entries = [*entries]
        whole, text = ("integer", "string", "null"), ("string", "null")
        self.needed = {name: whole if name in DENSE else text for name in wanted}
        self.optional = [name for name in COLUMNS if name not in wanted]

    def batch(self, values: Mapping[str, Sequence[Json]], rows: int) -> Batch:
        columns = [
            [_text(name, row, each) for row, each in enumerate(values[name])]
            if name in self.needed
            else [""] * rows
            for name in COLUMNS[1:]
        ]
        lines = "\n".join(map("\t".join, zip(*columns, strict=True))).encode()
        block = Block.empty(rows, labels=False, numbered=False)
        parsed, _, _, fault, column, _, _ = _core.criteo_parse(
            lines, 0, rows, None, block.dense, block.ids, 0
        )
        if fault:
            name = COLUMNS[column]
            raise RecordError(
                name, parsed, f"{brief(values[name][parsed])} is not {WANTED[fault]}."
            )
        made = block.batch(0, rows)
        return {name: made[name] for name in self._entries}


def _text(name: str, row: int, value: Json) -> str:
    """Return a value as it stands in a line."""
    if value is None:
        return ""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int:
        return str(value)
    if not isinstance(value, str):
        raise RecordError(name, row, f"{brief(value)} is no value of a click log.")
    if len(value) > _LONGEST or not value.isprintable():
        raise RecordError(name, row, f"{brief(value)} is no value of a click log.")
    return value
