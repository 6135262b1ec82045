"""Whether a manifest says what it should."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import cast

from hotbed.checkpoint.entries import FileEntry, TableEntry
from hotbed.checkpoint.names import FILE_OF_LOG, LOG
from hotbed.tables import DTYPES

__all__ = ["fault_of_entries"]

_FILE = re.compile(r"(dense|rows-[0-9]+-[0-9]+|removed-[0-9]+)\.safetensors")
_DTYPES = {str(dtype).removeprefix("torch.") for dtype in DTYPES}


def fault_of_entries(manifest: object) -> str:
    """Return what is wrong with the entries of a manifest; empty where they have the right types."""
    match manifest:
        case {
            "step": int(),
            "base": dict() | None as base,
            "tables": dict(tables),
            "files": list(files),
            "values": dict(),
        } if _is_uid(cast(Mapping[str, object], manifest).get("uid")):
            if base is not None and not _is_base(base):
                return "what it says of its base is incomplete"
        case _:
            return "it lacks entries"
    for stem, table in tables.items():
        match table:
            case {
                "rows": int() | None,
                "dim": int(),
                "dtype": str(dtype),
                "key": str() | None as key,
                "rule": dict() | None as rule,
                "removed": int() | None as removed,
            } if (
                dtype in _DTYPES
                and (key is None or re.fullmatch("[0-9a-f]{16}", key))
                and (rule is None or _is_rule(rule))
                and (removed is None or (base is not None and removed >= 0))
            ):
                pass
            case _:
                return f"what it says of table {stem!r} is incomplete"
    if fault := _fault_of_files(tables, files):
        return fault
    logs = cast(Mapping[str, object], manifest).get("linked", [])
    if not isinstance(logs, list):
        return "what it says of linked files is incomplete"
    return _fault_of_logs(tables, logs) or _fault_of_columns(tables, [*files, *logs])


def _fault_of_files(tables: Mapping[str, TableEntry], files: list[object]) -> str:
    names = set()
    for file in files:
        match file:
            case {"name": str(name), "bytes": int(), "crc32c": list(), "rows": dict(rows)}:
                if not _FILE.fullmatch(name) or name in names:
                    return f"it names the file {name!r}, which is none of a checkpoint, or twice"
                names.add(name)
            case _:
                return "what it says of a file is incomplete"
        if fault := _fault_of_rows(tables, name, rows):
            return fault
    return "" if "dense.safetensors" in names else "it names no file dense.safetensors"


_MOST_STORES, _MOST_TABLES = 256, 65_536  # of a row log


def _fault_of_logs(tables: Mapping[str, TableEntry], logs: list[object]) -> str:
    names = set()
    for log in logs:
        match log:
            case {"name": str(name), "files": [*files], "rows": dict(rows)} if rows:
                if not LOG.fullmatch(name) or name in names:
                    return f"it names the folder {name!r}, which is none of a checkpoint, or twice"
                names.add(name)
            case _:
                return "what it says of linked files is incomplete"
        for file in files:
            match file:
                case {"name": str(of_log), "bytes": int()} if FILE_OF_LOG.fullmatch(of_log):
                    pass
                case _:
                    return f"what it says of a file of {name} is incomplete"
        if fault := _fault_of_rows(tables, name, rows):
            return fault
        for stem, part in rows.items():
            match part:
                case {
                    "store": int(store),
                    "number": int(number),
                    "first": int(first),
                    "stride": int(stride),
                } if (
                    0 <= store < _MOST_STORES
                    and 0 <= number < _MOST_TABLES
                    and 0 <= first < 2**63
                    and 0 < stride < 2**63
                ):
                    pass
                case _:
                    return f"what it says of {stem!r} in {name} is incomplete"
    return ""


def _fault_of_rows(
    tables: Mapping[str, TableEntry], name: str, rows: Mapping[object, object]
) -> str:
    for stem, part in rows.items():
        match part:
            case {"count": int(count), "columns": [int(first), int(last)]} if stem in tables:
                if count >= 0 and 0 <= first < last <= tables[cast(str, stem)]["dim"]:
                    continue
        return f"{name} has rows of {stem!r}, which is no such table"
    return ""


def _fault_of_columns(tables: Mapping[str, TableEntry], files: list[FileEntry]) -> str:
    more: dict[str, dict[int, int]] = {stem: {0: 0} for stem in tables}  # rows from a column on
    for stem, part in ((stem, part) for file in files for stem, part in file["rows"].items()):
        for column, count in zip(part["columns"], (part["count"], -part["count"]), strict=True):
            more[stem][column] = more[stem].get(column, 0) + count
    for stem, changes in more.items():
        columns = sorted(changes)
        counts = itertools.accumulate(changes[column] for column in columns)
        dim = tables[stem]["dim"]
        if len({n for column, n in zip(columns, counts, strict=True) if column < dim}) > 1:
            return f"some columns of {stem!r} have more rows than others"
    return ""


def _is_uid(uid: object) -> bool:
    """Return True also for none, as earlier versions wrote none."""
    return uid is None or (isinstance(uid, str) and re.fullmatch("[0-9a-f]{32}", uid) is not None)


def _is_base(base: Mapping[object, object]) -> bool:
    match base:
        case {"name": str(name), "uid": str(uid)}:
            plain = os.path.basename(name) == name not in ("", ".", "..") and name.isprintable()
            return plain and _is_uid(uid)
    return False


def _is_rule(rule: Mapping[object, object]) -> bool:
    match rule:
        case {
            "name": str(),
            "options": dict(),
            "untouched": "lazy" | "exact",
            "states": [*states],
            "steps": int(steps),
        }:
            return (
                type(steps) is int
                and steps >= 0
                and all(
                    isinstance(state, list)
                    and [type(part) for part in state] == [str, int]
                    and state[1] > 0
                    for state in states
                )
            )
    return False
