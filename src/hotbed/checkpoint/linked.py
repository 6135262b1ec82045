"""Rows that a checkpoint shares with the SSD tier it was saved from: the files of a row log, hard-linked into
a folder of the checkpoint.

::

    log-W-N/             log N of writer W
        manifest         its tables
        S-NUMBER.rows    a file of rows

docs/internals/row-log.md describes what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from hotbed import _core
from hotbed.checkpoint.entries import LinkedLog, LinkedRows, Manifest, SizedFile, TableEntry
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.folder import complete_at
from hotbed.checkpoint.manifest import all_files, fault_of_files, read_manifest, sources
from hotbed.checkpoint.rows import TableRows, fault_of_ids
from hotbed.checkpoint.stores import store_of
from hotbed.errors import StorageError
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Lookups
from hotbed.table.records import rows_of_widths
from hotbed.tables import CORE_DTYPES

__all__ = [
    "LinkedBytes",
    "adopted",
    "link_rows",
    "linked_bytes",
    "linked_files",
    "linked_rows",
    "number_of",
]


def link_rows(
    folder: str, writer: int, tables: Mapping[str, LiveTable]
) -> tuple[list[LinkedLog], set[str]]:
    """Hard-link the rows of those tables that lie over an SSD, which are held. Returns what the manifest says
    of them, and the names of the tables.

    Raises:
        StorageError, OSError: they cannot be linked; some files may be there.
    """
    together: dict[Lookups, list[str]] = {}
    for stem, table in tables.items():
        together.setdefault(table.place.lookups, []).append(stem)
    logs: list[LinkedLog] = []
    for lookups, stems in together.items():
        name = f"log-{writer}-{len(logs)}"
        own = [tables[stem] for stem in stems]
        places = lookups.link(own, os.path.join(folder, name))
        if places is None:
            continue
        rows: dict[str, LinkedRows] = {}
        for stem, table, (store, number, count) in zip(stems, own, places, strict=True):
            columns, origin = table.spec.columns, table.spec.origin
            rows[stem] = {
                "count": count,
                "columns": [columns.start, columns.stop],
                "store": store,
                "number": number,
                "first": origin.first,
                "stride": origin.stride,
            }
        logs.append({"name": name, "files": _files_in(os.path.join(folder, name)), "rows": rows})
    return logs, {stem for log in logs for stem in log["rows"]}


def _files_in(folder: str) -> list[SizedFile]:
    with os.scandir(folder) as entries:
        return [
            {"name": entry.name, "bytes": entry.stat().st_size}
            for entry in sorted(entries, key=lambda entry: entry.name)
        ]


def linked_rows(
    folder: str, manifest: Manifest, stems: Collection[str]
) -> Iterator[tuple[str, TableRows]]:
    """Yield the rows of some tables, some megabytes at a time, each with the path of the log. The files are
    read twice; where each row lies takes some 12 bytes a row meanwhile.

    Raises:
        DamagedError: a file is missing or damaged, or holds something else.
    """
    for log in manifest.get("linked", ()):
        wanted = {stem: rows for stem, rows in log["rows"].items() if stem in stems}
        if not wanted:
            continue
        store_of(folder).refuse_links(
            f"{folder} is to have hard links", "Pack a checkpoint before you copy it there."
        )
        path = os.path.join(folder, log["name"])
        if fault := fault_of_files(folder, all_files((), [log])):
            raise DamagedError(fault)
        try:
            opened = _core.RowLog.open_to_read(path, locked=False)
        except StorageError as error:
            raise _told(path, error) from error
        for report in opened.recovery():
            for block in report["dropped_blocks"]:
                raise DamagedError(f"{block['path']} at {block['offset']:,}: {block['reason']}.")
        try:
            for store in sorted({rows["store"] for rows in wanted.values()}):
                own = {s: rows for s, rows in wanted.items() if rows["store"] == store}
                yield from _rows_of_store(path, opened, own, manifest["tables"])
        except DamagedError:
            raise
        except StorageError as error:
            raise _told(path, error) from error
        except ValueError as error:
            raise DamagedError(f"{path} is damaged: {error}") from error
        finally:
            opened.close()


_OF_THE_PROCESS = errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM


def _told(path: str, error: StorageError) -> StorageError | DamagedError:
    """Return what is to be raised where a log cannot be read: a damage, or what the process lacks."""
    if error.errno in _OF_THE_PROCESS:
        return error
    return DamagedError(f"{path} is damaged: {error}")


def _rows_of_store(
    path: str,
    log: _core.RowLog,
    wanted: Mapping[str, LinkedRows],
    entries: Mapping[str, TableEntry],
) -> Iterator[tuple[str, TableRows]]:
    """`wanted`: of one store, whose rows are all of one kind."""
    stem, first = next(iter(wanted.items()))
    entry, width = entries[stem], first["columns"][1] - first["columns"][0]
    rule = entry["rule"]
    states = [(f"states/{n}", 1 if w == 1 else width) for n, w in (rule["states"] if rule else ())]
    widths = [each for _, each in states]
    with_steps = rule is not None and rule["untouched"] == "exact"
    dtype = CORE_DTYPES[getattr(torch, entry["dtype"])]
    at_once = rows_of_widths(width, widths)
    by_number = {rows["number"]: stem for stem, rows in wanted.items()}
    stream = _core.RecordsByTable.make(
        log, first["store"], list(by_number), dtype, width, widths, with_steps, at_once
    )
    found = dict.fromkeys(wanted, 0)
    while (some := stream.next(True)) is not None:
        number, ids, weights, of_states, steps = some
        stem = by_number[number]
        rows = wanted[stem]
        found[stem] += len(ids)
        ids = rows["first"] + rows["stride"] * ids
        if fault := fault_of_ids(path, stem, ids, entries[stem]["rows"]):
            raise DamagedError(f"{fault}.")
        tensors = {"ids": ids, "weights": weights}
        tensors |= {name: state for (name, _), state in zip(states, of_states, strict=True)}
        if steps is not None:
            tensors["steps"] = steps
        yield path, TableRows(stem, slice(*rows["columns"]), tensors, is_copy=True)
    for stem, rows in wanted.items():
        _check_count(path, stem, found[stem], rows)


def adopted(
    folder: str, manifest: Manifest, tables: Mapping[str, LiveTable], same: Collection[str]
) -> set[str]:
    """Have tables of this process, whose rows are all first values, go on from the files of a checkpoint
    where they can. Returns the names of those that do.

    Args:
        tables: whose rows are wanted here.
        same: those that take rows with the bits that were saved, states too.

    Raises:
        StorageError, DamagedError: files are damaged, or cannot be linked.
    """
    done: set[str] = set()
    for log in manifest.get("linked", ()):
        stems = [*log["rows"]]
        if not all(
            stem in tables and stem in same and _has_all(manifest, log, stem, tables[stem])
            for stem in stems
        ):
            continue
        if fault := fault_of_files(folder, all_files((), [log])):
            raise DamagedError(fault)
        own = [tables[stem] for stem in stems]
        places = [(log["rows"][stem]["store"], log["rows"][stem]["number"]) for stem in stems]
        path = os.path.join(folder, log["name"])
        try:
            counts = own[0].place.lookups.adopt(own, path, places)
        except StorageError as error:
            raise _told(path, error) from error
        for stem, count in zip(stems, counts or (), strict=False):
            _check_count(path, stem, count, log["rows"][stem])
        done |= {*stems} if counts is not None else set()
    return done


class LinkedBytes(NamedTuple):
    """Sizes of linked files of a checkpoint, on the disk."""

    linked_bytes: int
    kept_bytes: int
    """Of them, files that the SSD tier has no more, nor another checkpoint: they go with this one."""


def linked_bytes(folder: str, manifest: Manifest) -> LinkedBytes:
    """Return how much of the disk the linked files of a checkpoint take."""
    total = kept = 0
    for file in all_files((), manifest.get("linked", ())):
        with contextlib.suppress(OSError):
            found = os.lstat(os.path.join(folder, file["name"]))
            size = found.st_blocks * 512
            total, kept = total + size, kept + size * (found.st_nlink == 1)
    return LinkedBytes(total, kept)


def linked_files(path: str) -> set[tuple[int, int]]:
    """Return the `number_of` each linked file of the complete checkpoints at a path, which is one or the
    folder of a run. Those that cannot be read have none."""
    found: set[tuple[int, int]] = set()
    with contextlib.suppress(CheckpointError):
        store_of(path).refuse_links(f"{path} is to have hard links", "")
        for folder in complete_at(path):
            with contextlib.suppress(CheckpointError, OSError):
                for file in all_files((), read_manifest(folder).get("linked", ())):
                    found.add(number_of(os.path.join(folder, file["name"])))
    return found


def number_of(file: str | os.PathLike[str]) -> tuple[int, int]:
    """Return what all names of a file have in common: its device and its number there."""
    about = os.lstat(file)
    return about.st_dev, about.st_ino


def _has_all(manifest: Manifest, log: LinkedLog, stem: str, table: LiveTable) -> bool:
    """Return True if a log has all rows of a table or part, and as they lie in it."""
    rows, entry, spec = log["rows"][stem], manifest["tables"][stem], table.spec
    others = sum(stem in source["rows"] for source in sources(manifest)) - 1
    return (
        str(spec.dtype) == f"torch.{entry['dtype']}"
        and rows["columns"] == [spec.columns.start, spec.columns.stop]
        and (rows["first"], rows["stride"]) == (spec.origin.first, spec.origin.stride)
        and entry["rows"] == spec.origin.rows
        # Of a dynamic table each may have any ids.
        and (entry["rows"] is not None or not others)
        and spec.origin.owns is None
    )


def _check_count(path: str, stem: str, found: int, rows: LinkedRows) -> None:
    if found != rows["count"]:
        raise DamagedError(
            f"{path} has {found:,} rows of {stem!r}, and was saved with {rows['count']:,}."
        )
