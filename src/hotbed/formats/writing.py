"""Tables of a checkpoint, and how they are written into arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hotbed.checkpoint.inspect import TableContents, contents, stored_rows
from hotbed.checkpoint.single import read
from hotbed.formats.tables import Chunks, FileTable, FormatError, Found
from hotbed.table.state_dict import refuse_ambiguous_names
from hotbed.tables import DTYPES

__all__ = ["file_name", "fill", "shapes_of", "tables_in", "widened"]


def tables_in(checkpoint: str) -> Found:
    """The tables of a checkpoint, while it is `opened`.

    Raises:
        CheckpointError: it is damaged.
    """

    def table(about: TableContents) -> FileTable:
        name, dim, dtype = about["table"], about["dim"], getattr(torch, about["dtype"], None)
        if dtype not in DTYPES:
            raise FormatError(
                f"Table {name!r} is {about['dtype']}, which rows of a table cannot be."
            )

        def chunks() -> Chunks:
            there = 0
            for chunk in read(checkpoint, name):
                if chunk.steps is not None and bool((chunk.steps != (about["steps"] or 0)).any()):
                    raise FormatError(
                        f"Table {name!r} has rows that are behind its optimizer. Load the checkpoint into "
                        "its model without one, and save that again."
                    )
                ids, rows = chunk.ids, about["rows"]
                if chunk.weights.dtype != dtype or (
                    rows and bool(((ids < 0) | (ids >= rows)).any())
                ):
                    raise FormatError(
                        f"Table {name!r} has rows that are none of it; hotbed checkpoint verify tells more."
                    )
                there += len(ids)
                yield ids, chunk.weights
            if not there:
                yield torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=dtype)

        return FileTable(name, about["rows"], counts[name], dim, dtype, chunks)

    counts = stored_rows(checkpoint)
    return Found([table(about) for about in contents(checkpoint)["tables"]], {})


def widened(tables: Iterable[FileTable]) -> list[FileTable]:
    """Tables without bfloat16, whose numbers are float32's, too."""

    def wide(table: FileTable) -> FileTable:
        if table.dtype != torch.bfloat16:
            return table
        chunks = table.chunks

        def floats() -> Chunks:
            return ((ids, weights.float()) for ids, weights in chunks())

        return table._replace(dtype=torch.float32, chunks=floats)

    return [wide(table) for table in tables]


def shapes_of(tables: Sequence[FileTable]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of tables as a ``state_dict`` has them: ``NAME`` (rows, dim), by id if the table is static;
    of a dynamic one beside it ``NAME.ids`` (rows,).

    Raises:
        FormatError: a static table lacks rows.
        TableError: a table is named as a part of another.
    """
    refuse_ambiguous_names({table.name for table in tables})
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for table in tables:
        if table.rows is None:
            shapes[f"{table.name}.ids"] = torch.int64, (table.stored,)
        elif table.stored < table.rows:
            raise _lacking(table, table.rows - table.stored)
        shapes[table.name] = table.dtype, (table.stored, table.dim)
    return shapes


def fill(tables: Sequence[FileTable], tensors: Mapping[str, Tensor]) -> None:
    """Writes tables into tensors of the names and shapes of `shapes_of`.

    Raises:
        FormatError: a static table lacks rows.
    """
    for table in tables:
        weights, at = tensors[table.name], 0
        there = torch.zeros(len(weights) if table.rows is not None else 0, dtype=torch.bool)
        for ids, rows in table.chunks():
            if table.rows is None:
                tensors[f"{table.name}.ids"][at : at + len(ids)] = ids
                weights[at : at + len(ids)] = rows
            else:
                weights[ids], there[ids] = rows, True
            at += len(ids)
        if missing := int((~there).sum()):
            raise _lacking(table, missing)


def _lacking(table: FileTable, missing: int) -> FormatError:
    return FormatError(
        f"Table {table.name!r} lacks {missing:,} of its {table.rows:,} rows: no batch has touched them, and "
        "only its model knows their first values. --format parquet writes those that are there."
    )


def file_name(table: str, ending: str) -> str:
    """The name of a table's file.

    Raises:
        FormatError: no file can have it.
    """
    name = table + ending
    if "/" in name or name.startswith(".") or len(os.fsencode(name)) > _LONGEST_NAME:
        raise FormatError(f"Table {table!r} cannot name a file. --rename OLD=NEW helps.")
    return name


_LONGEST_NAME = 255
