"""Tables on their way from one format to another: some rows at a time, wherever they lie."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter

from hotbed.checkpoint.rows import FILE_BYTES
from hotbed.checkpoint.stores import store_of
from hotbed.errors import HotbedError
from hotbed.tables import DTYPES, MAX_DIM

Chunks = Iterator[tuple[Tensor, Tensor]]
"""Ids (n,) int64 and weights (n, dim)."""


class FormatError(HotbedError, ValueError):
    """A table that cannot be read or written; the message names the file and the table."""


class FileTable(NamedTuple):
    name: str
    rows: int | None
    """Of a static table; None: dynamic."""
    stored: int
    """Rows that are there."""
    dim: int
    dtype: torch.dtype
    chunks: Callable[[], Chunks]
    unasked: str = ""
    """Why it is taken only if it is asked for; empty: it is a table."""


class Found(NamedTuple):
    tables: list[FileTable]
    skipped: dict[str, str]
    """Of other things, by name: why they are no tables."""


class Hints(NamedTuple):
    """Facts that a user knows of a folder that does not say them itself."""

    dim: int | None = None
    snapshot: str | None = None


class Reader(Protocol):
    hints: tuple[str, ...]
    """Those that it makes use of."""
    endings: tuple[str, ...]
    """Of files."""

    def is_in(self, folder: str) -> bool:
        """Whether a folder is one of this format, by its names."""

    def read(self, path: str, hints: Hints) -> Found:
        """Tables that are there; rows are read later.

        Raises:
            FormatError, OSError: it cannot be read.
        """


@runtime_checkable
class Writer(Protocol):
    endings: tuple[str, ...]

    def write(self, path: str, tables: Sequence[FileTable]) -> None:
        """Writes a file or a folder where nothing is; it appears when it is complete, or not at all.

        Raises:
            FormatError, OSError: nothing is there.
        """


class Array(Protocol):
    """A tensor, or what is read from a file like one."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any:
        """torch's, or another's that torch has not."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


_INTEGERS = tuple(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)


def fault_of(array: Array, *, static: bool = True) -> str:
    """Why an array is no rows of a table; empty if it is."""
    if isinstance(array, Tensor) and (
        type(array) not in (Tensor, Parameter)
        or array.layout is not torch.strided
        or array.is_quantized
        or array.is_meta
        or array.is_nested
    ):
        return "is no dense tensor with data"
    if isinstance(array, Tensor) and array.nbytes > max(
        FILE_BYTES, own := array.untyped_storage().nbytes()
    ):
        return (
            f"repeats {own:,} bytes to {array.nbytes:,}, as expand() does; what contiguous() makes of it can "
            "be saved and read"
        )
    if len(array.shape) != 2:
        return f"is {len(array.shape)}-D; rows are 2-D"
    if static and not array.shape[0]:
        return "has no rows"
    if array.dtype not in DTYPES:
        return f"is {name_of(array.dtype)}, which rows of a table cannot be"
    if not 0 < array.shape[1] <= MAX_DIM:
        return f"has {array.shape[1]:,} columns; a table has from 1 to {MAX_DIM:,}"
    return ""


def table_of(
    where: str, name: str, weights: Array, ids: Array | None = None, unasked: str = ""
) -> FileTable:
    """The table of an array without `fault_of`.

    Args:
        where: the file, for messages.
        ids: None: row i is that of id i, and the table static.

    Raises:
        FormatError: the ids are not those of its rows.
    """
    count, dim = weights.shape
    if ids is not None and (len(ids.shape) != 1 or ids.dtype not in _INTEGERS):
        raise FormatError(f"{where}: the ids of {name!r} are no integers in one dimension.")
    if ids is not None and ids.shape[0] != count:
        raise FormatError(f"{where}: {name!r} has {count:,} rows and {ids.shape[0]:,} ids.")

    def chunks() -> Chunks:
        for some in slices(count, dim * weights.dtype.itemsize):
            rows = weights[some].detach().resolve_neg().contiguous()
            own = torch.arange(some.start, some.stop) if ids is None else signed(ids[some])
            yield own, rows

    all_chunks = chunks if ids is None else lambda: distinct(where, name, chunks())
    rows = count if ids is None else None
    return FileTable(name, rows, count, dim, weights.dtype, all_chunks, unasked)


def refuse_without_room(path: str, tables: Sequence[FileTable]) -> None:
    """Raises FormatError where a checkpoint of tables has no room on the disk of `path`. A small file can
    tell of tables that are larger than any disk."""
    needed = sum(table.stored * (8 + table.dim * table.dtype.itemsize) for table in tables)
    free = store_of(path).free_bytes(path)
    if free is not None and needed > free:
        raise FormatError(
            f"{path} would have {needed:,} bytes, and {free:,} are free there. --table takes "
            "some tables only."
        )


def slices(count: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of so many rows, each for a file of a checkpoint; an empty one for none."""
    some = max(1, FILE_BYTES // (8 + row_bytes))
    for start in range(0, max(count, 1), some):
        yield slice(start, min(start + some, count))


def signed(ids: Tensor) -> Tensor:
    """Integers as int64. Those of uint64 keep their bits, as `hotbed.data.hash_ids` has it."""
    return ids.contiguous().view(torch.int64) if ids.dtype == torch.uint64 else ids.long()


def distinct(where: str, name: str, chunks: Chunks) -> Chunks:
    """Chunks as they are. Holds 8 bytes a row.

    Raises:
        FormatError: after the last one, if an id was there twice.
    """
    seen = []
    for ids, weights in chunks:
        seen.append(ids)
        yield ids, weights
    together = torch.cat(seen).sort().values
    twice = together[1:][together[1:] == together[:-1]]
    if len(twice):
        raise FormatError(f"{where}: {name!r} has the id {int(twice[0])} twice.")


def chosen(
    path: str, found: Found, names: Sequence[str], renamed: Mapping[str, str]
) -> list[FileTable]:
    """The tables that are meant, under their new names.

    Args:
        names: of tables; empty: all but those that must be asked for.
        renamed: new names by those that they have.

    Raises:
        FormatError: there are none, or no such ones, or two of a name.
    """
    known = {table.name: table for table in found.tables}
    if len(known) < len(found.tables):
        names_there = [table.name for table in found.tables]
        twice = next(name for name in names_there if names_there.count(name) > 1)
        raise FormatError(f"{path} has two tables that are named {twice!r}.")
    for name in [*names, *renamed]:
        if name in found.skipped:
            raise FormatError(f"{path}: {name!r} {found.skipped[name]}.")
        if name not in known:
            raise FormatError(f"{path} has no table {name!r}. It has {', '.join(known) or 'none'}.")
    taken = [known[name] for name in dict.fromkeys(names)]
    taken = taken or [table for table in found.tables if not table.unasked]
    if not taken:
        others = [f"{table.name!r} {table.unasked}" for table in found.tables]
        others += [f"{name!r} {why}" for name, why in found.skipped.items()]
        hint = " --table takes one nevertheless." if found.tables else ""
        raise FormatError(f"{path} has no table: {'; '.join(others[:5]) or 'it is empty'}.{hint}")
    if unused := set(renamed) - {table.name for table in taken}:
        raise FormatError(f"{path}: {min(unused)!r} is to be renamed, and is not taken.")
    taken = [table._replace(name=renamed.get(table.name, table.name)) for table in taken]
    own = [table.name for table in taken]
    for name in own:
        if not name or not name.isprintable():
            raise FormatError(f"{path}: {name!r} cannot name a table. --rename OLD=NEW helps.")
        if own.count(name) > 1:
            raise FormatError(f"{path}: two tables would be named {name!r}.")
    return taken


def name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def plain(path: str, folder: str | None = None) -> str:
    """The path, of a plain file.

    Args:
        folder: in which it must lie, links followed.

    Raises:
        FormatError: it is none.
        OSError: there is none.
    """
    if folder is not None:
        root = os.path.realpath(folder)
        if os.path.commonpath([root, os.path.realpath(path)]) != root:
            raise FormatError(f"{path} is a link out of its folder, which is not followed.")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FormatError(f"{path} is no plain file.")
    return path
