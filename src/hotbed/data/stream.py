"""A position in files of columns: rows are passed over, or become blocks of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hotbed.data.arrow_files import ColumnFile
from hotbed.data.arrow_values import BadValue
from hotbed.data.blocks import Block, Builder
from hotbed.data.columns import Source
from hotbed.data.lines import DataError
from hotbed.data.schema import Schema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Stream"]


class Stream:
    """Rows of files, one file after the other. For one thread."""

    def __init__(self, files: Iterable[ColumnFile], schema: Schema) -> None:
        self._files = iter(files)
        self._columns = schema.columns
        self._squeezed = frozenset({"label"} if len(schema.labels) == 1 else ())
        reads = (column.reads(name) for name, column in schema.columns.items())
        self._names = list(dict.fromkeys(name for names in reads for name in names))
        self._path = ""
        self._pieces: Iterator[pa.RecordBatch] = iter(())
        self._piece: pa.RecordBatch | None = None
        self._row = 0
        """Row of the file that the rest of the piece begins with."""

    def skip(self, most: int | None) -> int:
        """Pass up to `most` rows (None: all); returns how many there were."""
        passed = 0
        while most is None or passed < most:
            ahead = None if most is None else most - passed
            if self._has_rows():
                passed += self._take(ahead).num_rows
            elif (skipped := self._open(ahead)) is not None:
                passed += skipped
            else:
                break
        return passed

    def read(self, most: int) -> Block | None:
        """Return the next `most` rows, fewer at the end of the files; None: there are no more.

        Raises:
            DataError: a value that its column cannot have, or a damaged file.
        """
        blocks: list[Block] = []
        rows = 0
        while rows < most:
            if self._has_rows():
                first = self._row
                blocks.append(self._block(self._take(most - rows), first))
                rows += blocks[-1].rows
            elif self._open(0) is None:
                break
        return Block.joined(blocks) if blocks else None

    def _open(self, skip: int | None) -> int | None:
        """Go on to the next file, past up to `skip` of its rows (None: all) if it knows how many it has.

        Returns:
            Number of rows that were passed over; None: there are no more files.
        """
        file = next(self._files, None)
        if file is None:
            return None
        names = file.columns(self._names)
        known = file.known_rows() or 0
        self._path, self._row = file.path, known if skip is None else min(skip, known)
        self._pieces = (
            file.batches(names, self._row) if not known or self._row < known else iter(())
        )
        return self._row

    def _has_rows(self) -> bool:
        """True if this file has more rows; reads some of them."""
        while self._piece is None or not self._piece.num_rows:
            self._piece = next(self._pieces, None)
            if self._piece is None:
                return False
        return True

    def _take(self, most: int | None) -> pa.RecordBatch:
        assert self._piece is not None
        count = self._piece.num_rows if most is None else min(most, self._piece.num_rows)
        taken, self._piece = self._piece.slice(0, count), self._piece.slice(count)
        self._row += count
        return taken

    def _block(self, piece: pa.RecordBatch, first: int) -> Block:
        arrays = {name: piece.column(name) for name in self._names}
        source = Source(arrays, self._columns)
        builder = Builder(piece.num_rows, self._squeezed)
        for name, column in self._columns.items():
            try:
                column.add(name, source, builder)
            except BadValue as wrong:
                at = "" if wrong.row is None else f", row {first + wrong.row + 1}"
                raise DataError(f"{self._path}{at}, column {name!r}: {wrong.text}") from None
        return builder.block()
