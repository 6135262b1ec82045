"""Parquet: a column of ids and one of vectors, by pyarrow.

A table is a file ``NAME.parquet`` or a folder of that name with the files of its parts. Files that were
dumped have two entries in their schema's metadata: the table's name, and the rows of a static one. They
are sealed, see `hotbed.formats.parquet_seal`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotbed.files import appearing, appearing_folder
from hotbed.formats.mapped import synced
from hotbed.formats.parquet_seal import refuse_other_bytes, seal
from hotbed.formats.tables import (
    Chunks,
    FileTable,
    FormatError,
    Found,
    Hints,
    distinct,
    name_of,
    plain,
    slices,
)
from hotbed.formats.writing import file_name, widened
from hotbed.tables import MAX_DIM

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["Parquet"]

_ENDING = ".parquet"
_NAME, _ROWS = b"hotbed.table", b"hotbed.rows"


class Parquet:
    hints: tuple[str, ...] = ()
    endings: tuple[str, ...] = (_ENDING,)

    def is_in(self, folder: str) -> bool:
        return any(name.endswith(_ENDING) for name in [folder, *os.listdir(folder)])

    def read(self, path: str, hints: Hints) -> Found:
        _needs_arrow()
        if not os.path.isdir(path) or path.rstrip(os.sep).endswith(_ENDING):
            return Found([_table(path.rstrip(os.sep))], {})
        names = [name for name in sorted(os.listdir(path)) if name.endswith(_ENDING)]
        return Found([_table(os.path.join(path, name), path) for name in names], {})

    def write(self, path: str, tables: Sequence[FileTable]) -> None:
        _needs_arrow()
        tables = widened(tables)
        if path.endswith(_ENDING):
            if len(tables) != 1:
                raise FormatError(
                    f"{path} is to be a file of one table, and there are {len(tables)}: choose one with "
                    "--table, or name a folder."
                )
            with appearing(path) as part:
                _write(part, tables[0])
            return
        with appearing_folder(path) as folder:
            for table in tables:
                _write(os.path.join(folder, file_name(table.name, _ENDING)), table)


def _needs_arrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise FormatError("Parquet needs pyarrow: pip install hotbed[arrow].") from None


def _table(path: str, folder: str | None = None) -> FileTable:
    import pyarrow as pa
    import pyarrow.parquet as pq

    stem = os.path.basename(path).removesuffix(_ENDING)
    if os.path.isdir(path):
        parts = [name for name in sorted(os.listdir(path)) if name.endswith(_ENDING)]
        paths = [plain(os.path.join(path, name), folder or path) for name in parts]
    else:
        paths = [plain(path, folder)]
    with _told(path):
        for one in paths:
            refuse_other_bytes(one)
        files = [
            pq.ParquetFile(one, memory_map=True, page_checksum_verification=True) for one in paths
        ]
        count = sum(file.metadata.num_rows for file in files)
        if not files:
            raise FormatError(f"{path} has no files that end in {_ENDING}.")
        schema = files[0].schema_arrow
        columns = _columns(path, schema)
        types = [
            {c: file.schema_arrow.field(c).type for c in columns if c in file.schema_arrow.names}
            for file in files
        ]
        if any(own != types[0] for own in types):
            raise FormatError(f"{path} has parts whose columns differ.")
        vectors = schema.field(columns[1]).type
        dim = (
            vectors.list_size
            if pa.types.is_fixed_size_list(vectors)
            else _first_length(files, columns[1])
        )
    if not 0 < dim <= MAX_DIM:
        raise FormatError(
            f"{path} has vectors of {dim:,} numbers; a table has from 1 to {MAX_DIM:,}."
        )
    kind = vectors.value_type
    dtype = torch.float16 if pa.types.is_float16(kind) else torch.float32
    dtype = torch.float64 if pa.types.is_float64(kind) else dtype
    about = schema.metadata or {}
    name = about[_NAME].decode("utf-8", "replace") if _NAME in about else stem
    rows = _rows_of(path, about[_ROWS]) if _ROWS in about else None
    some = next(slices(1 << 62, dim * dtype.itemsize)).stop

    def chunks() -> Chunks:
        there = False
        for file in files:
            with _told(path):
                for batch in file.iter_batches(some, columns=columns):
                    there = True
                    yield (
                        _ids(path, batch.column(columns[0])),
                        _vectors(path, batch.column(columns[1]), dim),
                    )
        if not there:
            yield torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=dtype)

    return FileTable(name, rows, count, dim, dtype, lambda: distinct(path, name, chunks()))


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except (FormatError, MemoryError):
        raise
    except Exception as error:  # whatever a footer can make pyarrow raise
        text = " ".join(str(error).split())[:200].rstrip(".")
        raise FormatError(f"{path} cannot be read as Parquet: {text}.") from None


def _rows_of(path: str, text: bytes) -> int:
    if not text.isdigit() or len(text) > 15 or not 0 < int(text) < 1 << 48:
        raise FormatError(
            f"{path}: its entry {_ROWS.decode()} is {text[:20]!r}, which is no number of rows."
        )
    return int(text)


def _columns(path: str, schema: pa.Schema) -> list[str]:
    """Return the columns of ids and of vectors: the only ones of their kind, or those that are named so."""
    import pyarrow as pa

    def is_vector(kind: pa.DataType) -> bool:
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        return any(one(kind) for one in lists) and pa.types.is_floating(kind.value_type)

    found = []
    for what, fits in (("id", pa.types.is_integer), ("vector", is_vector)):
        names = [field.name for field in schema if fits(field.type)]
        if len(names) != 1 and what not in names:
            kind = "integers" if what == "id" else "lists of floats"
            raise FormatError(
                f"{path} needs one column of {kind}, or one that is named {what!r}; it has the columns "
                f"{', '.join(f'{field.name} ({field.type})' for field in schema) or 'none'}."
            )
        found.append(what if what in names else names[0])
    return found


def _first_length(files: Sequence[pq.ParquetFile], column: str) -> int:
    for file in files:
        for batch in file.iter_batches(1, columns=[column]):
            first = batch.column(column)[0]
            return len(first) if first.is_valid else 0
    return 0


def _ids(path: str, column: pa.Array) -> Tensor:
    if column.null_count:
        raise FormatError(f"{path} has rows without an id.")
    # Those of uint64 keep their bits.
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).astype("int64"))


def _vectors(path: str, column: pa.Array, dim: int) -> Tensor:
    import pyarrow.compute as pc

    numbers = column.flatten()
    lengths = pc.min_max(pc.list_value_length(column)).as_py()
    if column.null_count or numbers.null_count or set(lengths.values()) != {dim}:
        raise FormatError(f"{path} has vectors that lack numbers, or not all are of {dim:,}.")
    return torch.from_numpy(numbers.to_numpy(zero_copy_only=False).copy()).view(-1, dim)


def _write(path: str, table: FileTable) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}
    about = {_NAME: table.name.encode()}
    if table.rows is not None:
        about[_ROWS] = str(table.rows).encode()
    vectors = pa.list_(numbers[name_of(table.dtype)], table.dim)
    fields = [pa.field("id", pa.int64(), False), pa.field("vector", vectors, False)]
    schema = pa.schema(fields, metadata=about)
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as out:
        for ids, weights in table.chunks():
            flat = pa.array(weights.contiguous().view(-1).numpy())
            columns = [pa.array(ids.numpy()), pa.FixedSizeListArray.from_arrays(flat, type=vectors)]
            out.write_batch(pa.record_batch(columns, schema=schema))
    seal(path)
    synced(path)


FORMAT = Parquet()
