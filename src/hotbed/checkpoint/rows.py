"""Rows of tables as files, in any order and by any number of writers.

Of table ``T`` a file has ``T/ids`` (n,), ``T/weights`` (n, columns), ``T/states/NAME`` (n, columns or 1)
and, of a table with ``untouched="exact"``, ``T/steps`` (n,): the step up to which each row is current.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.files import CheckpointError, read_tensors, write_tensors
from hotbed.table.live import LiveTable
from hotbed.table.records import Records, records_of

__all__ = ["FILE_BYTES", "columns_of", "ids_of", "read_rows", "tensors_of", "write_rows"]

FILE_BYTES = 64 << 20
"""Of rows in a file; twice as much is in memory while it is written."""


def write_rows(
    folder: str, tables: Mapping[str, LiveTable], *, states: bool, writer: int = 0
) -> list[dict[str, Any]]:
    """Writes all stored rows, while the tables are held; with states as they are stored, else weights as
    the last step has left them. Returns what the manifest says of the files.

    Raises:
        OSError, StorageError: some files may be there.
    """
    files = []
    for number, chunks in enumerate(_by_file(tables, states)):
        name = f"rows-{writer}-{number}.safetensors"
        tensors = {
            f"{stem}/{part}": torch.cat(pieces)
            for stem, parts in chunks.items()
            for part, pieces in parts.items()
        }
        rows = {
            stem: {
                "count": len(tensors[f"{stem}/ids"]),
                "columns": [*columns_of(tables[stem]).indices(1 << 31)[:2]],
            }
            for stem in chunks
        }
        written = write_tensors(os.path.join(folder, name), tensors)
        files.append({"name": name, **written, "rows": rows})
    return files


_Chunks = dict[str, dict[str, list[Tensor]]]


def _by_file(tables: Mapping[str, LiveTable], states: bool) -> Iterator[_Chunks]:
    stems = {table: stem for stem, table in tables.items()}
    chunks: _Chunks = {}
    held = 0
    for table, records in records_of([*stems], states=states, current=not states):
        parts = chunks.setdefault(stems[table], {})
        for part, tensor in tensors_of(table, records).items():
            parts.setdefault(part, []).append(tensor)
            held += tensor.nbytes
        if held >= FILE_BYTES:
            yield chunks
            chunks, held = {}, 0
    if chunks:
        yield chunks


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


def columns_of(table: LiveTable) -> slice:
    """Those of the whole table that a part has."""
    first = table.spec.origin.column
    return slice(first, first + table.spec.dim)


def ids_of(table: LiveTable, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ids of the whole table as a part has them, and which of them it has; None: all."""
    origin = table.spec.origin
    if origin.owns is not None:
        here = origin.owns(ids)
        return ids[here], here
    if origin.first == 0 and origin.stride == 1:
        return ids, None
    here = (ids >= origin.first) & ((ids - origin.first) % origin.stride == 0)
    return (ids[here] - origin.first) // origin.stride, here


class _Rows(NamedTuple):
    stem: str
    columns: slice
    tensors: dict[str, Tensor]
    """By their part, such as ``weights`` and ``states/sum``."""


def read_rows(
    folder: str, files: Sequence[dict[str, Any]], stems: Sequence[str]
) -> Iterator[tuple[str, _Rows]]:
    """The rows of some tables, file by file: the path of the file, and what it has of one table.

    Raises:
        CheckpointError: a file is missing or damaged, or holds something else.
    """
    for file in files:
        wanted = [stem for stem in file["rows"] if stem in stems]
        if not wanted:
            continue
        path = os.path.join(folder, file["name"])
        tensors = read_tensors(path, file)
        for stem in wanted:
            own = {
                name.removeprefix(f"{stem}/"): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{stem}/")
            }
            count = file["rows"][stem]["count"]
            if any(len(tensor) != count for tensor in own.values() if tensor.dim()):
                raise CheckpointError(
                    f"{path} has not {count:,} rows of {stem!r}, as its manifest says."
                )
            yield path, _Rows(stem, slice(*file["rows"][stem]["columns"]), own)
