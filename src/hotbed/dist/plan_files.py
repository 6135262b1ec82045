"""Plans as TOML: see docs/plans.md."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hotbed.errors import PlanError
from hotbed.files import Json, appearing, read_toml
from hotbed.sharding import KINDS, Sharding
from hotbed.text import toml_string

__all__ = ["from_values", "read_file", "text_of", "values_of", "write_file"]

_VERSION = 1
_RENAMED = {"keeper": "owner", "keepers": "owners"}
"""Keys of plans that were written before 0.2, and how they are called now."""


def text_of(world_size: int, shardings: Mapping[str, Sharding], notes: Mapping[str, str]) -> str:
    """A plan as TOML; `notes` are put beside the tables as comments."""
    lines = [f"version = {_VERSION}", f"world_size = {world_size}"]
    for name, sharding in shardings.items():
        note = f"  # {notes[name]}" if name in notes else ""
        lines += ["", f"[tables.{toml_string(name)}]{note}"]
        for field, value in _values_of(sharding).items():
            written = toml_string(value) if isinstance(value, str) else json.dumps(value)
            lines.append(f"{field} = {written}")
    return "\n".join(lines) + "\n"


def values_of(world_size: int, shardings: Mapping[str, Sharding]) -> dict[str, Json]:
    """Return a plan as plain values, in the form of its file."""
    tables: dict[str, Json] = {name: _values_of(one) for name, one in shardings.items()}
    return {"version": _VERSION, "world_size": world_size, "tables": tables}


def _values_of(sharding: Sharding) -> dict[str, Json]:
    """Return the name of a kind, and those of its fields that say something."""
    fields = {field: getattr(sharding, field) for field in _fields(type(sharding))}
    kept = {field: _listed(value) for field, value in fields.items() if value is not None}
    return {"sharding": sharding.name, **kept}


def _listed(value: Json | tuple[Any, ...]) -> Json:
    """Return a field with lists for tuples."""
    return [_listed(one) for one in value] if isinstance(value, tuple) else value


def write_file(path: str, text: str) -> None:
    """Write a file, which appears whole."""
    with appearing(path) as part, open(part, "wb") as file:
        file.write(text.encode())


def read_file(path: str) -> tuple[int, dict[str, Sharding]]:
    """(world size, shardings) of a plan.

    Raises:
        PlanError: naming the file and what in it is wrong.
    """
    try:
        return from_values(read_toml(path))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}.") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except ValueError as error:  # of numbers of too many digits, too
        raise PlanError(f"{path} is not TOML: {error}.") from None


def from_values(read: object) -> tuple[int, dict[str, Sharding]]:
    """Return (world size, shardings) of a plan's plain values.

    Raises:
        PlanError: they are of no plan.
    """
    match read:
        case {"version": version, "world_size": world_size, "tables": {**tables}, **others}:
            pass
        case _:
            raise PlanError("A plan has the keys version and world_size, and [tables].")
    if type(version) is not int or version != _VERSION:
        raise PlanError(f"version {version!r} is not {_VERSION}, which is the one known here.")
    if others:
        raise PlanError(f"The key {next(iter(others))!r} is unknown.")
    return world_size, {str(n): _sharding(str(n), entry) for n, entry in tables.items()}


def _sharding(name: str, entry: object) -> Sharding:
    if not isinstance(entry, dict):
        raise PlanError(f"Table {name!r} is {entry!r}, and must be a section [tables.{name}].")
    fields = {str(_RENAMED.get(key, key)): value for key, value in entry.items()}
    if len(fields) < len(entry):
        raise PlanError(f"Table {name!r} has a key under its earlier and its present name.")
    kind = fields.pop("sharding", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise PlanError(
            f"Table {name!r}: sharding must be one of {', '.join(KINDS)}, not {kind!r}."
        )
    known = _fields(KINDS[kind])
    for key in fields:
        if key not in known:
            said = f"has {', '.join(known)}" if known else "has no more keys"
            raise PlanError(f"Table {name!r}: unknown key {key!r}; sharding {kind!r} {said}.")
    try:
        return KINDS[kind](**fields)
    except PlanError as error:
        raise PlanError(f"Table {name!r}: {error}") from None


def _fields(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]
