"""Entries of tables in a manifest."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from hotbed import init
from hotbed.checkpoint.entries import RuleEntry, TableDescription, TableEntry
from hotbed.checkpoint.errors import CheckpointError
from hotbed.files import Json
from hotbed.table.live import LiveTable
from hotbed.tables import Table

__all__ = ["described", "differences", "entry_of", "key_in", "table_of"]


def described(spec: Table) -> TableDescription:
    """A `Table` but for its name, as JSON values; a part as the table that was cut."""
    return {
        "rows": spec.origin.rows,
        "dim": spec.origin.dim,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "combiner": spec.combiner,
        "padding_idx": _padding_of(spec),
        "init": _init_of(spec.init),
    }


def table_of(name: str, entry: TableDescription) -> Table:
    """The `Table` that was `described`.

    Raises:
        CheckpointError: its initializer was the user's own.
        KeyError, TableError, TypeError, ValueError: no `described` has made it.
    """
    if entry["init"] is None:
        raise CheckpointError(
            f"Table {name!r} starts from an initializer that is none of hotbed.init, so the model cannot "
            "be made from its checkpoint alone. Make it yourself, and read its rows by hotbed.load."
        )
    return Table(
        name,
        entry["dim"],
        entry["rows"],
        entry["combiner"],
        getattr(torch, entry["dtype"]),
        _made_again(entry["init"]),
        entry["padding_idx"],
    )


def entry_of(table: LiveTable, rule: RuleEntry | None) -> TableEntry:
    """Return a manifest's entry of a table. `rule`: of its states, if they are saved."""
    return {
        **described(table.spec),
        "key": f"{table.key:016x}",
        "rule": rule,
        "removed": None,  # ids: of a checkpoint that tells what has changed since another
    }


def _padding_of(spec: Table) -> int | None:
    if spec.padding_idx is None:
        return None
    return int(spec.origin.ids_in_table(spec.padding_idx))


def _init_of(initializer: init.Initializer | init.Columns) -> dict[str, Json] | None:
    kind = type(initializer)
    if (
        kind.__module__ != init.__name__
        or kind.__name__ not in init.__all__
        or not dataclasses.is_dataclass(initializer)
    ):
        return None  # one of the user's
    if isinstance(initializer, init.Columns):
        parts = [(width, _init_of(each)) for width, each in initializer.parts]
        if None in (each for _, each in parts):
            return None
        return {"kind": "Columns", "parts": [[width, each] for width, each in parts]}
    return {"kind": type(initializer).__name__, **dataclasses.asdict(initializer)}


def _made_again(entry: object) -> init.Initializer | init.Columns:
    match entry:
        case {"kind": "Columns", "parts": [*parts]}:
            return init.Columns([(width, _plain(each)) for width, each in parts])
        case _:
            return _plain(entry)


def _plain(entry: object) -> init.Initializer:
    match entry:
        case {"kind": str(kind), **options} if kind in init.__all__:
            made: init.Initializer = getattr(init, kind)(
                **{str(key): value for key, value in options.items()}
            )
            return made
        case _:
            raise ValueError(f"its initializer {entry!r} is unknown")


def key_in(entry: TableEntry, table: LiveTable) -> int:
    """The table's own where none was saved."""
    return table.key if entry["key"] is None else int(entry["key"], 16)


def differences(table: LiveTable, entry: TableEntry, strict: bool) -> str:
    """Why rows of what was saved are none of a table; empty if they are. `strict`: or mean something else
    there."""
    origin = table.spec.origin
    if entry["dim"] != origin.dim:
        return f"was saved with dim {entry['dim']}, and has {origin.dim}"
    if None not in (entry["rows"], origin.rows) and entry["rows"] != origin.rows:
        return f"was saved with {entry['rows']} rows, and has {origin.rows}"
    if not strict or entry.get("combiner") is None:  # which tables made elsewhere do not tell
        return ""
    field: Literal["combiner", "padding_idx", "init"]
    for field in ("combiner", "padding_idx", "init"):
        was, now = entry.get(field), described(table.spec)[field]
        if field == "padding_idx" and now is None and table.spec.origin.is_cut:
            continue  # its row is in another part
        if was != now and not (field == "init" and None in (was, now)):  # one of the user's
            return f"was saved with {field} {was!r}, and has {now!r}; strict=False loads it nevertheless"
    return ""
