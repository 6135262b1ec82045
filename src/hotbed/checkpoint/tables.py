"""What a manifest says of tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hotbed import init
from hotbed.checkpoint.rules import rule_of
from hotbed.table.live import LiveTable

__all__ = ["differences", "entry_of", "key_in"]


def entry_of(table: LiveTable, *, states: bool) -> dict[str, Any]:
    """A table as JSON values; a part as the table that was cut."""
    spec, origin = table.spec, table.spec.origin
    return {
        "rows": origin.rows,
        "dim": origin.dim,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "combiner": spec.combiner,
        "padding_idx": _padding_of(spec),
        "init": _init_of(spec.init),
        "key": f"{table.key:016x}",
        "rule": rule_of(table) if states else None,
        "removed": None,  # ids: of a checkpoint that tells what has changed since another
    }


def _padding_of(spec: Any) -> int | None:
    if spec.padding_idx is None:
        return None
    return int(spec.origin.ids_in_table(spec.padding_idx))


def _init_of(initializer: Any) -> dict[str, Any] | None:
    if type(initializer).__name__ not in init.__all__:
        return None  # one of the user's
    fields = dataclasses.fields(initializer)
    return {
        "kind": type(initializer).__name__,
        **{field.name: getattr(initializer, field.name) for field in fields},
    }


def key_in(entry: dict[str, Any], table: LiveTable) -> int:
    """The table's own where none was saved."""
    return table.key if entry["key"] is None else int(entry["key"], 16)


def differences(table: LiveTable, entry: dict[str, Any]) -> str:
    """Why rows of what was saved are none of a table; empty if they are."""
    origin = table.spec.origin
    if entry["dim"] != origin.dim:
        return f"was saved with dim {entry['dim']}, and has {origin.dim}"
    if None not in (entry["rows"], origin.rows) and entry["rows"] != origin.rows:
        return f"was saved with {entry['rows']} rows, and has {origin.rows}"
    if not isinstance(getattr(torch, str(entry["dtype"]), None), torch.dtype):
        return f"was saved with rows of {entry['dtype']!r}, which torch has not"
    return ""
