"""`Schema`: the columns of a data set and what each becomes in a batch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from hotbed import init as initializers
from hotbed.data.columns import Column, Feature, Id, Label, Number, Pair, Sequence
from hotbed.data.fields import SchemaError
from hotbed.data.schema_files import columns_from, json_of, toml_of
from hotbed.files import Json, appearing, read_toml
from hotbed.paths import path_text
from hotbed.tables import Table

__all__ = ["Schema"]

_SHARED = ("label", "dense")


@dataclasses.dataclass(frozen=True)
class Schema:
    """Columns of a data set by name, each of one kind. Columns of a file that it does not name are not read.

    >>> schema = hb.data.Schema({"clicked": hb.data.Label(), "user": hb.data.Id(), "item": hb.data.Id()})
    >>> schema.features
    {'user': 'user', 'item': 'item'}

    Kinds are `Label`, `Number`, `Id`, `Ids`, `Sequence`, `Pair` and `Key` of `hotbed.data`. Files are TOML,
    with a kind's fields as keys::

        [columns]
        clicked = "label"
        price = { kind = "number", transform = "log" }
        item = "id"
        genres = { kind = "ids", separator = "|" }
        history = { kind = "sequence", table = "item", length = 20 }

    Raises:
        SchemaError: no columns, a name that is none, tables whose features do not agree, a `Pair` of columns
            that are no `Id`.
    """

    columns: Mapping[str, Column]
    """Column name → its kind."""

    def __post_init__(self) -> None:
        columns = dict(self.columns) if isinstance(self.columns, Mapping) else {}
        if not columns:
            raise SchemaError("A schema needs columns: a dict of names, such as {'user': Id()}.")
        for name, column in columns.items():
            _check(name, column, columns)
        object.__setattr__(self, "columns", columns)
        by_table: dict[str, str] = {}
        for name, table in self.features.items():
            first = by_table.setdefault(table, name)
            _refuse_other(table, first, columns[first], name, columns[name])

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, in the order of ``batch["label"]``."""
        return tuple(name for name, column in self.columns.items() if isinstance(column, Label))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the numbers, in the order of ``batch["dense"]``."""
        return tuple(name for name, column in self.columns.items() if isinstance(column, Number))

    @property
    def features(self) -> dict[str, str]:
        """Feature → name of its table, as `hotbed.EmbeddingCollection` takes them."""
        return {name: feature.table or name for name, feature in self._features()}

    def histories(self) -> dict[str, list[str]]:
        """Return the names of sequences, each with those of the other features of its table."""
        features = self.features
        names = [name for name, column in self.columns.items() if isinstance(column, Sequence)]
        return {
            name: [n for n, table in features.items() if table == features[name] and n not in names]
            for name in names
        }

    def tables(self, dim: int, init: initializers.Initializer | None = None) -> list[Table]:
        """Return the tables of the features, of vectors of `dim` numbers.

        A table of a `Sequence` has no pooling and its padding id; of an `Ids`, that one's pooling.

        Raises:
            TableError: a `dim` that cannot be honoured.
        """
        tables = []
        for table in dict.fromkeys(self.features.values()):
            sharing = [f for name, f in self._features() if (f.table or name) == table]
            rows, padding = sharing[0].rows, [f.padding for f in sharing if f.padding is not None]
            combiners = [f.combiner for f in sharing if f.combiner is not None]
            tables.append(
                Table(
                    table,
                    dim,
                    None if rows is None else rows + 1,
                    combiner=combiners[0] if combiners else "sum",
                    init=init or initializers.Normal(),
                    padding_idx=padding[0] if padding else None,
                )
            )
        return tables

    def _features(self) -> list[tuple[str, Feature]]:
        return [(n, column) for n, column in self.columns.items() if isinstance(column, Feature)]

    def without(self, names: tuple[str, ...]) -> Schema:
        """Return the schema of the other columns.

        Raises:
            SchemaError: none is left.
        """
        left = {name: column for name, column in self.columns.items() if name not in names}
        if not left:
            raise SchemaError(
                f"Without {', '.join(map(repr, names))} the schema has no column to be read. Name others."
            )
        return Schema(left)

    def as_json(self) -> dict[str, Json]:
        """Return plain values that `from_json` takes, for checkpoints and JSON files."""
        return json_of(self.columns)

    @classmethod
    def from_json(cls, values: object) -> Schema:
        """Return the schema of the values that `as_json` returned, or of a TOML file's.

        Raises:
            SchemaError: unknown kinds or keys, values of the wrong type.
            InputError: `path` is no path.
        """
        return cls(columns_from(values))

    def to_toml(self) -> str:
        """Return the schema as TOML, a line a column."""
        return toml_of(self.columns)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the schema as TOML. The file appears when it is complete."""
        with appearing(path_text(path)) as part, open(part, "w", encoding="utf-8") as file:
            file.write(self.to_toml())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schema:
        """Return the schema in a TOML file.

        Raises:
            SchemaError: no such file, not TOML, unknown kinds or keys, values of the wrong type.
            InputError: `path` is no path.
        """
        named = path_text(path)
        try:
            return cls.from_json(read_toml(named))
        except SchemaError as error:
            wrong = str(error)
        except OSError as error:
            wrong = f"{error.strerror}."
        except ValueError as error:  # of numbers of too many digits, too
            wrong = f"not TOML: {error}."
        raise SchemaError(f"{named}: {wrong}")


def _check(name: object, column: object, columns: Mapping[str, Column]) -> None:
    try:
        is_name = isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise SchemaError(f"A column's name must be a string that is not empty, not {name!r}.")
    if not isinstance(column, Column):
        raise SchemaError(
            f"Column {name!r} must be a kind such as hotbed.data.Id(), not {column!r}."
        )
    if name in _SHARED and column.key != name:
        raise SchemaError(
            f"Column {name!r} of the kind {column.kind!r} would take the place of batch[{name!r}]. "
            "Rename the column."
        )
    if isinstance(column, Pair):
        for one in column.of:
            if not isinstance(columns.get(one), Id):
                raise SchemaError(
                    f"Column {name!r} is a pair of {one!r}, which must be a column of the kind 'id'."
                )


def _refuse_other(table: str, first: str, one: Column, name: str, other: Column) -> None:
    """Raise SchemaError where two features cannot share a table."""
    assert isinstance(one, Feature) and isinstance(other, Feature)
    for what, a, b in (
        ("rows", one.rows, other.rows),
        ("hashed ids", one.hashes, other.hashes),
        ("pooling", one.combiner or other.combiner, other.combiner or one.combiner),
    ):
        if a != b:
            raise SchemaError(
                f"Table {table!r} is shared by {first!r} and {name!r}, whose {what} differ: {a} and {b}. "
                "Make them the same, or give one a table of its own."
            )
