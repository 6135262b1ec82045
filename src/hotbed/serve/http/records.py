"""Requests that give columns of the data as they stand in its files: text, numbers, lists and nulls.

``{"records": [{column: value}, ...]}`` has a sample an entry, ``{"columns": {column: [...]}}`` a list a
column. A value is encoded as in training: text is hashed, numbers are transformed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

from hotbed.data import Schema
from hotbed.data.records import Columns, CriteoColumns, RecordError, SchemaColumns
from hotbed.files import Json
from hotbed.serve.bundles.bundle import CRITEO, Bundle
from hotbed.serve.http.errors import RequestError, wrong
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.parts import Input, Part

__all__ = ["KEYS", "Encoded", "Records", "Unencoded", "are_records", "records_of"]

KEYS = ("records", "columns")
"""Of a body that gives columns."""
NO_ARROW = "The server reads columns with pyarrow, which is not there: pip install 'hotbed[arrow]'."
NO_SCHEMA = (
    "The bundle does not say how columns become inputs: its model has no schema. Ask with instances or "
    "inputs."
)


class Encoded(NamedTuple):
    """Samples of a request."""

    parts: dict[str, Part]
    samples: int


class Unencoded(NamedTuple):
    """In place of `Records`: why no columns can be given."""

    status: int
    why: str


class Records:
    """Columns that some inputs are made of. Several threads may ask.

    Raises:
        ValueError: columns make other inputs than those.
    """

    def __init__(self, columns: Columns, inputs: Mapping[str, Input], limits: Limits) -> None:
        self.columns, self._inputs, self._limits = columns, inputs, limits
        self.needed = [*columns.needed]
        self.known = {*self.needed, *columns.optional}
        self._parts({name: [None] for name in self.needed}, 1)

    def encoded(self, body: Mapping[str, Json]) -> Encoded:
        """Return the samples of a body, which has one of `KEYS`.

        Raises:
            RequestError: it is not as the columns are; the column is named.
        """
        given = body.keys() - {"signature_name"}
        if len(given) != 1:
            raise RequestError(
                400, f"The body has one of records and columns, not {_listed(given)}."
            )
        columns = self._of_rows(body) if "records" in body else self._of_columns(body)
        counts = {name: len(values) for name, values in columns.items()}
        rows = counts[self.needed[0]]
        for name, count in counts.items():
            if count != rows:
                raise wrong(name, f"has {count} values, and {self.needed[0]} {rows}.")
        if not rows:
            raise RequestError(400, "There are no samples.")
        if rows > self._limits.samples:
            raise RequestError(
                413, f"There are {rows} samples, and {self._limits.samples} may be asked."
            )
        try:
            return Encoded(self._parts(columns, rows), rows)
        except RecordError as error:
            at = "" if error.row is None or rows == 1 else f"value {error.row}, "
            raise wrong(error.column, f"{at}{error.text}") from None

    def _parts(self, columns: Mapping[str, list[Json]], rows: int) -> dict[str, Part]:
        self._check_lists(columns)
        batch = self.columns.batch(columns, rows)
        return {name: each.of_batch(batch[name]) for name, each in self._inputs.items()}

    def _check_lists(self, columns: Mapping[str, list[Json]]) -> None:
        """Refuse lists that are longer than bags may be, before anything is made of them."""
        most = self._limits.ids
        for name, separator in self.columns.separators.items():
            for each in columns[name]:
                count = len(each) if isinstance(each, list) else 0
                if isinstance(each, str) and separator:
                    count = each.count(separator) + 1
                if count > most:
                    raise RequestError(
                        413, f"{name}: a sample has {count} ids, and may have {most}."
                    )

    def _of_rows(self, body: Mapping[str, Json]) -> dict[str, list[Json]]:
        records = body["records"]
        if not isinstance(records, list):
            raise wrong("records", "is a list with a sample an entry.")
        for n, each in enumerate(records):
            if not isinstance(each, dict):
                raise wrong(f"records[{n}]", f"is an object with {', '.join(self.needed)}.")
            self._check_names(each, f"records[{n}]")
        rows = cast("list[dict[str, Json]]", records)
        return {name: [each[name] for each in rows] for name in self.needed}

    def _of_columns(self, body: Mapping[str, Json]) -> dict[str, list[Json]]:
        columns = body["columns"]
        if not isinstance(columns, dict):
            raise wrong("columns", f"is an object with {', '.join(self.needed)}.")
        self._check_names(columns, "columns")
        found: dict[str, list[Json]] = {}
        for name in self.needed:
            values = columns[name]
            if not isinstance(values, list):
                raise wrong(name, "is a list with a value of each sample.")
            found[name] = values
        return found

    def _check_names(self, given: Mapping[str, Json], where: str) -> None:
        """Refuse columns that are missing, or that the data has not; labels and keys may be there."""
        if given.keys() <= self.known and all(name in given for name in self.needed):
            return
        names = ", ".join(self.needed)
        for name in self.needed:
            if name not in given:
                raise wrong(
                    name, f"is missing in {where}. It takes {names}; null is a missing value."
                )
        unknown = next(name for name in given if name not in self.known)
        raise wrong(unknown[:40], f"is no column of the data, in {where}. It takes {names}.")


def _listed(names: Iterable[str]) -> str:
    return " and ".join(repr(name[:40]) for name in sorted(names))


def are_records(body: Json) -> bool:
    """Return whether a request gives columns."""
    return isinstance(body, dict) and not body.keys().isdisjoint(KEYS)


def records_of(bundle: Bundle, inputs: Mapping[str, Input], limits: Limits) -> Records | Unencoded:
    """Return the columns that some inputs of a bundle are made of, or why there are none."""
    schema = None if bundle["model"] is None else bundle["model"].get("schema")
    try:
        if schema is not None:
            columns: Columns = SchemaColumns(Schema.from_json(schema), inputs)
        elif bundle.get("encoding") == CRITEO:
            columns = CriteoColumns(inputs)
        else:
            return Unencoded(400, NO_SCHEMA)
        return Records(columns, inputs, limits)
    except ImportError:
        return Unencoded(501, NO_ARROW)
    except KeyError as error:
        return Unencoded(
            400, f"Columns do not make the input {error}. Ask with instances or inputs."
        )
    except (
        ValueError,
        RequestError,
    ) as error:  # the sample of the export was another than the schema's
        return Unencoded(
            400, f"Columns do not make these inputs: {error} Ask with instances or inputs."
        )
