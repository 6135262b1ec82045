"""Rows of tables as files, in any order and by any number of writers.

Of table ``T`` a file has ``T/ids`` (n,), ``T/weights`` (n, columns), ``T/states/NAME`` (n, columns or 1)
and, of a table with ``untouched="exact"``, ``T/steps`` (n,): the step up to which each row is current.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.entries import FileEntry, FileRows, Manifest, Written
from hotbed.checkpoint.errors import DamagedError
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.tensors import read_views, write_tensors
from hotbed.table.live import LiveTable
from hotbed.table.records import Records

__all__ = [
    "FILE_BYTES",
    "IdFilter",
    "Piece",
    "TableRows",
    "fault_of_ids",
    "most_bytes",
    "read_rows",
    "rows_in",
    "tensors_of",
    "write_files",
    "write_rows",
]

FILE_BYTES = 32 << 20
"""Of rows in a file; some five times as much is in memory while files are written or read."""

_READERS = 4
"""Files that are read while rows of another go to their place: some are checked while others come from the
disk."""

_WRITERS = 2
"""Files on their way to the disk while the next one is put together: one is copied to the system's memory
while another is brought from there to the disk."""


def write_rows(
    folder: str,
    rows: Iterable[tuple[str, LiveTable, Records]],
    *,
    writer: int = 0,
    beside: bool = False,
) -> list[FileEntry]:
    """Writes rows, each with the name and the table that they are of. Returns what the manifest says of the
    files.

    Args:
        beside: as of `write_files`.

    Raises:
        OSError, StorageError: some files may be there.
    """
    pieces = ((stem, t.spec.columns, tensors_of(t, some)) for stem, t, some in rows)
    return write_files(folder, pieces, writer, beside=beside)


Piece = tuple[str, slice, Mapping[str, Tensor]]
"""Some rows on their way to files: table, columns, and tensors by their part, which stay as they are."""


def write_files(
    folder: str, pieces: Iterable[Piece], writer: int = 0, *, beside: bool = False
) -> list[FileEntry]:
    """Writes rows to files of about `FILE_BYTES`. Returns what the manifest says of them.

    Args:
        beside: whether others work meanwhile, so that files are written one after the other, by this thread.

    Raises:
        OSError: some files may be there.
    """
    named: list[tuple[str, dict[str, FileRows]]] = []
    written: list[Written] = []
    under_way: list[Future[Written]] = []
    if beside or not threading.main_thread().is_alive():  # an ending process begins no threads
        for number, (tensors, rows) in enumerate(_packed(pieces)):
            named.append((f"rows-{writer}-{number}.safetensors", rows))
            path = os.path.join(folder, named[-1][0])
            written.append(write_tensors(path, tensors, beside=beside))
        return _entries(named, written)
    with ThreadPoolExecutor(_WRITERS) as pool:
        for number, (tensors, rows) in enumerate(_packed(pieces)):
            name = f"rows-{writer}-{number}.safetensors"
            named.append((name, rows))
            if len(under_way) == _WRITERS:
                written.append(under_way.pop(0).result())
            under_way.append(pool.submit(write_tensors, os.path.join(folder, name), tensors))
        written += [one.result() for one in under_way]
    return _entries(named, written)


def _entries(
    named: Sequence[tuple[str, dict[str, FileRows]]], written: Sequence[Written]
) -> list[FileEntry]:
    return [
        {"name": name, "rows": rows, **one}
        for (name, rows), one in zip(named, written, strict=True)
    ]


def _packed(
    pieces: Iterable[Piece],
) -> Iterator[tuple[dict[str, list[Tensor]], dict[str, FileRows]]]:
    """(tensors in parts, what the manifest says of their rows) of one file after the other. A file has one
    range of columns of each table."""
    tensors: dict[str, list[Tensor]] = {}
    rows: dict[str, FileRows] = {}
    held = 0
    for stem, columns, parts in pieces:
        if stem in rows and rows[stem]["columns"] != [columns.start, columns.stop]:
            yield tensors, rows
            tensors, rows, held = {}, {}, 0
        own = rows.setdefault(stem, {"count": 0, "columns": [columns.start, columns.stop]})
        own["count"] += len(parts["ids"])
        for part, tensor in parts.items():
            tensors.setdefault(f"{stem}/{part}", []).append(tensor)
            held += tensor.nbytes
        if held >= FILE_BYTES:
            yield tensors, rows
            tensors, rows, held = {}, {}, 0
    if rows:
        yield tensors, rows


def most_bytes(tables: Mapping[str, LiveTable], *, states: bool) -> int:
    """Return the bytes that the rows take in files, if all are stored."""
    size = 0
    for table in tables.values():
        spec = table.spec
        size += len(table) * (8 + spec.dim * spec.dtype.itemsize + 8 * (states and table.follows))
        if states:
            size += len(table) * sum(table.core.state_widths()) * spec.compute_dtype.itemsize
    return size


def tensors_of(table: LiveTable, records: Records) -> dict[str, Tensor]:
    """Ids are those of the whole table."""
    assert records.weights is not None
    tensors = {"ids": table.spec.origin.ids_in_table(records.ids), "weights": records.weights}
    names = table.core.state_names if records.states is not None else ()
    for name, state in zip(names, records.states or (), strict=True):
        tensors[f"states/{name}"] = state
    if records.steps is not None:
        tensors["steps"] = records.steps
    return tensors


class TableRows(NamedTuple):
    stem: str
    columns: slice
    tensors: dict[str, Tensor]
    """By their part, such as ``weights`` and ``states/sum``."""
    is_copy: bool = False
    """True if others do not use the memory again."""


IdFilter = Callable[[str, Tensor], bool]
"""Whether any of (n,) int64 ids of a table are wanted."""


def read_rows(
    folder: str,
    manifest: Manifest,
    stems: Sequence[str],
    *,
    again: bool = False,
    any_wanted: IdFilter | None = None,
) -> Iterator[tuple[str, TableRows]]:
    """The rows of some tables, file by file: the path of the file, and what it has of one table. The next
    files are read meanwhile.

    Args:
        again: files are read into the same memory in turn, so that what one has is gone when the next
            is asked for.
        any_wanted: of a file of which no ids are, little more is read than these, and no rows are given.

    Raises:
        DamagedError: a file is missing or damaged, or holds something else.
    """
    wanted = [file for file in manifest["files"] if any(stem in stems for stem in file["rows"])]
    paths = [os.path.join(folder, file["name"]) for file in wanted]
    most = max(_sizes_of(folder, wanted), default=0)
    memory: list[Tensor | None] = [None] * (_READERS + 1)
    if again and most <= 4 * FILE_BYTES:  # larger ones have memory of their own
        memory = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in memory]
    begun = zip(paths, wanted, itertools.cycle(memory), strict=False)
    read = functools.partial(_read, stems, any_wanted)
    with _readers() as pool:
        under_way = collections.deque(
            pool.submit(read, *each) for each in itertools.islice(begun, _READERS)
        )
        for path in paths:
            file, tensors = under_way.popleft().result()
            under_way.extend(pool.submit(read, *each) for each in itertools.islice(begun, 1))
            for stem in file["rows"]:
                if stem in stems:
                    yield path, rows_in(path, manifest, file, stem, tensors)


@contextlib.contextmanager
def _readers() -> Iterator[ThreadPoolExecutor]:
    """For a ``with`` statement: threads that read. At its end none is waited for: an iterator that is dropped
    ends where the garbage collector meets it, in a thread that may hold what threads need to end."""
    pool = ThreadPoolExecutor(_READERS)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _read(
    stems: Collection[str],
    any_wanted: IdFilter | None,
    path: str,
    file: FileEntry,
    memory: Tensor | None,
) -> tuple[FileEntry, dict[str, Tensor]]:
    """Read a file, and return what the manifest says of it and the tensors; of one of which no ids are wanted
    as if it had no rows."""
    if any_wanted is None:
        return file, read_views(path, file, memory)
    names, is_any = {f"{stem}/ids": stem for stem in file["rows"] if stem in stems}, [False]

    def look(found: Mapping[str, Tensor]) -> bool:
        is_any[0] = found.keys() != names.keys() or any(
            ids.dtype != torch.int64 or ids.dim() != 1 or any_wanted(names[name], ids)
            for name, ids in found.items()
        )
        return is_any[0]

    tensors = read_views(path, file, memory, only=names, rest_if=look)
    if is_any[0]:
        return file, tensors
    none = {stem: FileRows(count=0, columns=rows["columns"]) for stem, rows in file["rows"].items()}
    return {**file, "rows": none}, tensors


def fault_of_ids(path: str, stem: str, ids: Tensor, rows: int | None) -> str:
    """Return what is wrong with ids of a table of so many rows (None: of any ids); empty for nothing."""
    if rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        return f"{path} has an id of {stem!r} outside [0, {rows})"
    return ""


def _sizes_of(folder: str, files: Sequence[FileEntry]) -> list[int]:
    """Bytes of files as they are, and not as a manifest says."""
    try:
        there = store_of(folder).sizes_in(folder)
    except OSError:  # told when they are read
        return []
    return [there.get(file["name"], 0) for file in files]


def rows_in(
    path: str,
    manifest: Manifest,
    file: FileEntry,
    stem: str,
    tensors: Mapping[str, Tensor],
) -> TableRows:
    """Return the rows of one table in a file of tensors; names of tables may have slashes.

    Raises:
        DamagedError: it is not what its manifest says.
    """
    count, columns = file["rows"][stem]["count"], slice(*file["rows"][stem]["columns"])
    wide, narrow = (count, columns.stop - columns.start), (count, 1)
    rule = manifest["tables"][stem]["rule"]
    states = rule["states"] if rule else []
    known = ["ids", "weights", "steps", *(f"states/{name}" for name, _ in states)]
    own = {part: tensors[f"{stem}/{part}"] for part in known if f"{stem}/{part}" in tensors}
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "ids": ((count,),),
        "steps": ((count,),),
        "weights": (wide,),
    }
    for name in {"ids", "weights", *own}:
        found = own.get(name)
        if (
            found is None
            or found.shape not in shapes.get(name, (wide, narrow))
            or (name in ("ids", "steps") and found.dtype != torch.int64)
        ):
            raise DamagedError(f"{path} has no {name} of {stem!r} as its manifest says.")
    return TableRows(stem, columns, own)
