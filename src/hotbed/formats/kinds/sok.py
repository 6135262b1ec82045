"""The folder that HugeCTR's Sparse Operation Kit dumps (`sok.dump`).

Of each table two files, ``NAME-key`` and ``NAME-weight``: a header of 296 bytes, then numbers. A header is
the table's name, to the right in 256 bytes and often blank; the kind of the file, 0 for keys and 1 for
weights; the name of an optimizer's slot, in 32 bytes; the type of the numbers. Kind and type are big-endian,
4 bytes.
"""

from __future__ import annotations

import os
import string
from collections.abc import Sequence

import numpy as np
import torch

from hotbed.files import appearing_folder
from hotbed.formats.mapped import Numbers, mapped, numbers_in, synced
from hotbed.formats.tables import (
    FileTable,
    FormatError,
    Found,
    Hints,
    fault_of,
    name_of,
    plain,
    table_of,
)
from hotbed.formats.writing import fill, shapes_of, widened

__all__ = ["Sok"]

_TYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")
_NAME_BYTES, _SLOT_BYTES, _HEADER_BYTES = 256, 32, 296
_KEYS, _WEIGHTS = 0, 1
_IN_FILE_NAMES = str.maketrans({sign: "_" for sign in string.punctuation})
"""What becomes of a name in those of files, where `sok.load` looks for them."""


class Sok:
    hints: tuple[str, ...] = ("dim",)
    endings: tuple[str, ...] = ()

    def is_in(self, folder: str) -> bool:
        names = set(os.listdir(folder))
        return any(f"{name[:-4]}-weight" in names for name in names if name.endswith("-key"))

    def read(self, path: str, hints: Hints) -> Found:
        tables, skipped = [], {}
        names = sorted(os.listdir(path))
        for name in names:
            stem, dash, kind = name.rpartition("-")
            if dash and kind in ("key", "weight"):
                if f"{stem}-key" not in names or f"{stem}-weight" not in names:
                    raise FormatError(f"{path} has {name!r} and not the other file of {stem!r}.")
                if kind == "key":
                    table = _table(path, stem, hints.dim)
                    if table is None:
                        skipped[stem] = (
                            "has no rows, and only --dim could tell how wide they would be"
                        )
                        continue
                    tables.append(table)
                    if hints.dim not in (None, tables[-1].dim):
                        raise FormatError(
                            f"{path}: {stem!r} has rows of {tables[-1].dim} numbers, and not {hints.dim}."
                        )
            elif f"{name.partition('-')[0]}-weight" in names:
                skipped[name] = "is an optimizer's state"
        return Found(tables, skipped)

    def write(self, path: str, tables: Sequence[FileTable]) -> None:
        tables = widened(tables)
        shapes = shapes_of(tables)
        stems = [table.name.translate(_IN_FILE_NAMES) for table in tables]
        for table, stem in zip(tables, stems, strict=True):
            if stems.count(stem) > 1:
                raise FormatError(
                    f"{path}: {table.name!r} and another table would both be {stem!r} there; --rename one."
                )
        with appearing_folder(path) as folder:
            rooms, files = {}, []
            for table, stem in zip(tables, stems, strict=True):
                ids = f"{table.name}.ids"
                for name, kind, ending in ((ids, _KEYS, "key"), (table.name, _WEIGHTS, "weight")):
                    dtype, shape = shapes.get(name, (torch.int64, (table.stored,)))
                    files.append(os.path.join(folder, f"{stem}-{ending}"))
                    header = _header(table.name, kind, name_of(dtype))
                    rooms[name] = mapped(files[-1], dtype, shape, header)
                if table.rows is not None:
                    torch.arange(table.stored, out=rooms[ids])
            fill(tables, rooms)
            for file in files:
                synced(file)


def _table(folder: str, stem: str, dim: int | None) -> FileTable | None:
    """None: it has no rows, whose `dim` its files do not tell."""
    where = {kind: os.path.join(folder, f"{stem}-{kind}") for kind in ("key", "weight")}
    _, keys = _numbers(plain(where["key"], folder), _KEYS, 1)
    count = keys.shape[0]
    name, weights = _numbers(plain(where["weight"], folder), _WEIGHTS, count, dim or 0)
    if not count and dim is None:
        return None
    if fault := fault_of(weights, static=False):
        raise FormatError(f"{where['weight']} {fault}.")
    return table_of(folder, name or stem, weights, keys)


def _numbers(path: str, kind: int, rows: int, dim: int = 0) -> tuple[str, Numbers]:
    """(name, the numbers of a file): keys (n,), or weights (rows, dim). `dim`: of no rows."""
    with open(path, "rb") as file:
        header = file.read(_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size - _HEADER_BYTES
    type_at = int.from_bytes(header[-4:], "big")
    found = int.from_bytes(header[_NAME_BYTES : _NAME_BYTES + 4], "big")
    if size < 0 or found != kind or type_at >= len(_TYPES):
        raise FormatError(f"{path} does not begin as a file of sok.dump does.")
    dtype = _TYPES[type_at]
    item = int(dtype[-2:]) // 8
    if size % (item * rows) if rows else size:
        what = f"{rows:,} rows" if kind == _WEIGHTS else dtype
        raise FormatError(
            f"{path} has {size:,} bytes after its header, which are no {what}: it is cut off."
        )
    shape = (size // item,) if kind == _KEYS else (rows, size // item // rows if rows else dim)
    name = header[:_NAME_BYTES].decode("utf-8", "replace").strip(" \0")
    return name, numbers_in(path, np.dtype(dtype).newbyteorder("<"), shape, _HEADER_BYTES)


def _header(name: str, kind: int, dtype: str) -> bytes:
    raw = name.encode()
    if len(raw) > _NAME_BYTES:
        raise FormatError(f"Table {name!r} has a name of more than {_NAME_BYTES} bytes.")
    slot, numbers = b" " * _SLOT_BYTES, _TYPES.index(dtype).to_bytes(4, "big")
    return raw.rjust(_NAME_BYTES) + kind.to_bytes(4, "big") + slot + numbers


FORMAT = Sok()
