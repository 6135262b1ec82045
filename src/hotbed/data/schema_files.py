"""Schemas as JSON values and as TOML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from hotbed.data.columns import KINDS, Column
from hotbed.data.fields import SchemaError, nearest
from hotbed.files import Json
from hotbed.text import brief, toml_string

__all__ = ["columns_from", "json_of", "toml_of"]


def json_of(columns: Mapping[str, Column]) -> dict[str, Json]:
    """``{"columns": {name: {"kind": ..., field: value}}}``; fields of their defaults are left out."""
    return {"columns": {name: {"kind": c.kind, **_changed(c)} for name, c in columns.items()}}


def toml_of(columns: Mapping[str, Column]) -> str:
    """The columns as TOML, a line each."""
    lines = ["[columns]"]
    for name, column in columns.items():
        fields = {"kind": column.kind, **_changed(column)}
        written = ", ".join(f"{key} = {_value(value)}" for key, value in fields.items())
        short = toml_string(column.kind) if len(fields) == 1 else f"{{ {written} }}"
        lines.append(f"{_key(name)} = {short}")
    return "\n".join(lines) + "\n"


def columns_from(values: object) -> dict[str, Column]:
    """Columns of what `json_of` returned, or of a TOML file; raises SchemaError."""
    sections = dict(values) if isinstance(values, Mapping) else {}
    columns = sections.pop("columns", None)
    if not isinstance(columns, Mapping) or not columns:
        raise SchemaError("A schema has a section [columns], with a line for each column.")
    for key in sections:
        raise SchemaError(f"Unknown key {key!r}; a schema has the section [columns] alone.")
    return {name: _column(name, entry) for name, entry in columns.items()}


def _column(name: object, entry: object) -> Column:
    where = f"Column {name!r}:"
    fields = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, Mapping):
        raise SchemaError(f'{where} {brief(entry)} is no kind; write "id", or {{ kind = "id" }}.')
    fields = dict(fields)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise SchemaError(f"{where} kind is {brief(kind)}; {nearest(kind, KINDS)}")
    known = [field.name for field in dataclasses.fields(KINDS[kind])]
    for key in fields:
        if key not in known:
            hint = nearest(key, known) if known else "it has no keys."
            raise SchemaError(f"{where} unknown key {key!r} of kind {kind!r}; {hint}")
    try:
        return KINDS[kind](**fields)
    except SchemaError as error:
        raise SchemaError(f"{where} {error}") from None
    except TypeError:
        required = [f.name for f in dataclasses.fields(KINDS[kind]) if _is_required(f)]
        raise SchemaError(f"{where} kind {kind!r} needs the key {', '.join(required)}.") from None


def _changed(column: Column) -> dict[str, Json]:
    """Fields that have other values than by default."""
    found: dict[str, Json] = {}
    for field in dataclasses.fields(column):
        value = getattr(column, field.name)
        if value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else toml_string(name)


def _value(value: Json) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return toml_string(value)
    return json.dumps(value)
