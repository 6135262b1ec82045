"""`ColumnFiles`, which is `hotbed.data.open`: batches from files of columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from hotbed.data.arguments import Checked, labels_of, row_range, whole
from hotbed.data.arrow_files import ColumnFile, file_of, require_arrow
from hotbed.data.blocks import Block
from hotbed.data.criteo_lines import Batch
from hotbed.data.fields import SchemaError
from hotbed.data.fingerprints import Checksums
from hotbed.data.paths import Paths, files_of
from hotbed.data.schema import Schema
from hotbed.data.stream import Stream
from hotbed.data.windows import Fingerprint, SampleReader
from hotbed.text import brief

__all__ = ["ColumnFiles"]

_BLOCK_ROWS = 1 << 14
"""Rows that are converted at a time, if batches are smaller and nobody else reads the rest."""


class ColumnFiles(SampleReader):
    """Batches from Parquet, CSV or TSV files, which are read no more than is needed; also named
    `hotbed.data.open`.

    A batch is a dict of tensors, as the kinds of the schema's columns say::

        "label"        float32 (B,), or (B, T) of T labels
        "dense"        float32 (B, n): the numbers, in the order of the schema
        each feature   int64 (B,) for Id and Pair, hotbed.Jagged for Ids, int64 (B, length) for Sequence
        each key       a list of B strings, or int64 (B,)

    The value of a column has the same id in every format: text and integers are hashed as text.

    Args:
        paths: a file or several, in the order given; a folder or a pattern such as ``"days/*.parquet"``,
            whose files are sorted. Text may be compressed by gzip, zstd or bzip2; the first bytes tell.
        schema: columns that are read; see `Schema`.
        batch_size: rows a batch.
        shuffle: False keeps the order of the files. A number (True means 65,536) permutes rows within windows
            of that many, rounded up to whole batches; the permutations depend on `seed` and on how many
            iterations went before.
        seed: of the permutations, 0 <= seed < 2**64; None: one drawn from torch's default generator at the
            first iteration.
        drop_last: leave out the last batch if it has fewer than `batch_size` rows.
        rows: read rows [a, b) only: a slice without a step, or a pair. Negative numbers count from the end.
            Rows are numbered over all files.
        labels: False leaves out the labels of the schema, ``"auto"`` lets the first file decide for all, True
            needs them.
        columns: names of the columns of text files without a header.

    Iterable again and again, and seekable as a `CriteoLog` is: `hotbed.train.fit`, `hotbed.lookahead` and
    `hotbed.dist.slices` take it. In a ``DataLoader(files, batch_size=None, num_workers=k)`` worker w reads
    batches w, w + k, ... (windows, if they are shuffled), so every row comes once and, unshuffled, the
    batches come in the same order as without workers. With a seed, workers that are started anew shuffle
    each epoch as the first: pass ``persistent_workers=True``, call `seek`, or give `fit` a position.

    Raises:
        FileNotFoundError: a path does not exist.
        DataError: pyarrow is missing, a folder is empty. While reading: a column is missing, a value does not
            fit its column, a line is malformed, a file is damaged; the message names file, row and column.
        SchemaError: no schema.
        InputError: an option has no such value, also when it is set later.
    """

    labels = Checked(labels_of)
    paths = Checked(lambda name, paths: files_of(paths))
    schema = Checked(lambda name, schema: _schema(schema))
    columns = Checked(lambda name, columns: _header(columns))

    def __init__(
        self,
        paths: Paths,
        schema: Schema,
        batch_size: int = 4096,
        *,
        shuffle: bool | int = False,
        seed: int | None = None,
        drop_last: bool = False,
        rows: slice | tuple[int | None, int | None] | None = None,
        labels: bool | Literal["auto"] = True,
        columns: Sequence[str] | None = None,
    ) -> None:
        require_arrow()
        self.schema = schema
        self.paths = paths
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.labels = labels
        self.columns = columns
        self.start, self.stop = row_range(rows, self._all_rows)

    def count_rows(self) -> int:
        """Return the number of rows in range. Reads text through; Parquet files tell."""
        total = self._all_rows() if self.stop is None else self._rows_up_to(self.stop)
        return max(0, total - self.start)

    def fingerprint(self, rows: int | None = None) -> Fingerprint:
        """Return the fingerprint of all samples, or of those up to row `rows`. Reads them through.

        It is one of what the schema makes of the columns it names: copies in Parquet and CSV, compressed or
        cut into files in other ways, have the same, and files that rows were added to have the one that they
        had, for the rows that they had.
        """
        rows = None if rows is None else whole("rows", rows)
        stream, sums = self._stream(), Checksums()
        while rows is None or sums.rows < rows:
            block = stream.read(_BLOCK_ROWS if rows is None else min(_BLOCK_ROWS, rows - sums.rows))
            if block is None:
                break
            sums.add(block)
        return Fingerprint(sums.rows, sums.crc32c())

    def __iter__(self) -> Iterator[Batch]:
        worker, workers, passed, generator, unit = self._begin()
        if workers == 1 and not self.shuffle:
            unit = max(1, _BLOCK_ROWS // self.batch_size) * self.batch_size
        for block, first in self._units(unit, worker, workers, generator, passed):
            for at in range(first * self.batch_size, block.rows, self.batch_size):
                end = min(at + self.batch_size, block.rows)
                if self.drop_last and end - at < self.batch_size:
                    return
                yield block.batch(at, end)

    def _units(
        self,
        unit: int,
        worker: int,
        workers: int,
        generator: np.random.Generator | None,
        passed: int,
    ) -> Iterator[tuple[Block, int]]:
        """Yield blocks of `unit` rows of this worker, and how many of its batches are passed over."""
        stream = self._stream()
        stream.skip(self.start)
        position = self.start
        ahead = worker * unit
        while True:
            if self.stop is not None:
                ahead = min(ahead, self.stop - position)
            if stream.skip(ahead) < ahead:
                return
            position += ahead
            most = unit if self.stop is None else min(unit, self.stop - position)
            ahead = (workers - 1) * unit
            whole_unit = passed * self.batch_size >= unit
            if whole_unit:
                block, rows = None, stream.skip(most)
            else:
                block = stream.read(most) if most else None
                rows = block.rows if block is not None else 0
            if not rows:
                return
            position += rows
            order = None if generator is None else generator.permutation(rows)
            if block is not None:
                yield (block if order is None else block.permuted(order)), passed
            passed = max(0, passed - unit // self.batch_size)

    def _stream(self) -> Stream:
        files = self._files()
        schema = self.schema
        if schema.labels and self.labels is not True:
            there = self.labels == "auto" and set(schema.labels) <= set(next(files).names())
            if not there:
                schema = schema.without(schema.labels)
        return Stream(self._files(), schema)

    def _files(self) -> Iterator[ColumnFile]:
        return (file_of(path, self.columns) for path in self.paths)

    def _all_rows(self) -> int:
        return sum(file.count_rows() for file in self._files())

    def _rows_up_to(self, stop: int) -> int:
        """Return the number of rows, or `stop` if there are more; reads no file behind it."""
        total = 0
        for file in self._files():
            if total >= stop:
                break
            total += file.count_rows()
        return min(total, stop)

    def _part(self, begin: int, end: int, *, is_test: bool) -> ColumnFiles:
        """Return a reader of some of the rows."""
        return ColumnFiles(
            self.paths,
            self.schema,
            self.batch_size,
            shuffle=0 if is_test else self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last and not is_test,
            rows=(begin, end),
            labels=self.labels,
            columns=self.columns,
        )


def _schema(schema: object) -> Schema:
    if not isinstance(schema, Schema):
        raise SchemaError(
            f"schema is {brief(schema)}; give a hotbed.data.Schema, such as Schema.read(path)."
        )
    return schema


def _header(columns: object) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise SchemaError(f"columns is {brief(columns)}; give the names of all columns, as a list.")
    if not all(isinstance(name, str) for name in columns):
        raise SchemaError(f"columns is {brief(columns)}; all names must be strings.")
    return list(columns)
