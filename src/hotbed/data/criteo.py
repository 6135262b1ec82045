"""The Criteo click logs as batches."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import get_worker_info

from hotbed.arrays import is_one_of
from hotbed.data.arguments import Checked, flag, labels_of, row_range, whole
from hotbed.data.criteo_lines import CATEGORIES, DENSE, Batch, Reader
from hotbed.data.lines import DataError, existing
from hotbed.data.windows import Fingerprint, SampleReader, Skipped
from hotbed.errors import InputError
from hotbed.text import brief

MISSING_ID = -1
"""Id of a column that is empty."""

Path = str | os.PathLike[str]

_KEPT_EXAMPLES = 5
_EXAMPLE_BYTES = 2048
_MOST_WORKERS = 256
_logger = logging.getLogger("hotbed.data")


class CriteoLog(SampleReader):
    """Batches from headerless Criteo click logs: ``label, I1..I13, C1..C26``, tabs between.

    A batch is a dict of tensors::

        "label"       float32 (B,)     0 or 1; absent where the lines carry no label
        "dense"       float32 (B, 13)  log(1 + max(x, 0)) of I1..I13; missing: 0
        "C1".."C26"   int64   (B,)     rows of one contiguous (26, B) block

    The ids are the hexadecimal values themselves (0 to ``2**32 - 1``; `criteo_ids` of their text), ready
    for dynamic tables; no pass over the data builds a vocabulary. A missing value is id -1, which no
    value equals, so each column has a row of its own for it. Negative integers occur in the logs
    (-1, -2, -3 in I2) and become 0, as missing ones do.

    Args:
        paths: a file or several, read in the order given. gzip is recognised by content.
        batch_size: rows a batch.
        on_error: ``"raise"``, or ``"skip"`` to pass over malformed lines, count them in
            `skipped` and log a warning at the end. Batch i still covers rows
            i * batch_size to (i + 1) * batch_size - 1 (or a window its own rows), so a batch
            with skipped lines is shorter, and one of nothing else is not yielded.
        drop_last: leave out the last batch if it covers fewer than `batch_size` rows.
        rows: read rows [a, b) only: a slice without a step, or a pair. Negative numbers count
            from the end. Rows are numbered over all files; blank lines have no number, malformed
            ones do.
        shuffle: False keeps the order of the file, which for click logs is time. A number (True
            means 65,536) permutes rows within windows of that many, rounded up to whole batches;
            the permutations depend on `seed` and on how many iterations went before.
        labels: True where lines start with a label (40 columns), False where they do not (39),
            ``"auto"`` to let the first line decide for all.
        line_numbers: add ``"line"``, int64 (B,): from 1 over all files, blank lines counted.
        seed: of the permutations, 0 <= seed < 2**64; None: one drawn from torch's default generator at
            the first iteration.

    In a ``DataLoader(log, batch_size=None, num_workers=k)`` worker w reads batches w, w + k, ...
    (windows, with `shuffle`), so every row comes once and, unshuffled, the batches come in the
    same order as without workers. Every worker reads through the files, but parses its part only.

    Raises:
        FileNotFoundError: a path does not exist.
        DataError: a malformed line (with file and line number), or a damaged gzip file.
        InputError: an option has no such value, also when it is set later.

    Blank lines are passed over, lines may end in ``\\r\\n``, and the last one in nothing. A gzip
    file that ends too early is an error also with ``on_error="skip"``, after the rows before it.
    """

    labels = Checked(labels_of)
    paths = Checked(lambda name, paths: existing(paths))
    line_numbers = Checked(flag)

    def __init__(
        self,
        paths: Path | Iterable[Path],
        batch_size: int = 512,
        *,
        on_error: Literal["raise", "skip"] = "raise",
        drop_last: bool = False,
        rows: slice | tuple[int | None, int | None] | None = None,
        shuffle: bool | int = False,
        labels: bool | Literal["auto"] = True,
        line_numbers: bool = False,
        seed: int | None = None,
    ) -> None:
        self.paths = paths
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.labels = labels
        self.line_numbers = line_numbers
        self.seed = seed
        self.start, self.stop = row_range(rows, lambda: Reader(self.paths).skip(None))
        # A row for each worker (the first: no workers) in memory that all of them share: a counter,
        # and example messages, one a line.
        self._counts: torch.Tensor | None = None
        self._examples: torch.Tensor | None = None
        self.on_error = on_error

    @property
    def on_error(self) -> Literal["raise", "skip"]:
        """Return what becomes of malformed lines."""
        return "raise" if self._counts is None else "skip"

    @on_error.setter
    def on_error(self, value: Literal["raise", "skip"]) -> None:
        if not is_one_of(value, ("raise", "skip")):
            raise InputError(f"on_error is {brief(value)}; it must be 'raise' or 'skip'.")
        if value == "raise":
            self._counts = self._examples = None
        elif self._counts is None:
            rooms: list[Any] = [
                torch.zeros(1 + _MOST_WORKERS, dtype=torch.int64, device="cpu"),
                torch.zeros(1 + _MOST_WORKERS, _EXAMPLE_BYTES, dtype=torch.uint8, device="cpu"),
            ]
            self._counts, self._examples = (room.share_memory_() for room in rooms)

    @property
    def skipped(self) -> Skipped:
        """Lines that the latest iteration passed over so far. Workers may be ahead of the consumer."""
        if self._counts is None:
            return Skipped(0, ())
        examples = [e for row in self._counts.nonzero() for e in self._examples_of(int(row))]
        return Skipped(int(self._counts.sum()), tuple(examples[:_KEPT_EXAMPLES]))

    def _examples_of(self, row: int) -> list[str]:
        assert self._examples is not None
        text = self._examples[row].numpy().tobytes().rstrip(b"\0")
        return text.decode("utf-8", "replace").split("\n") if text else []

    def count_rows(self) -> int:
        """Rows in range, malformed lines included. Reads the files through, fast."""
        reader = Reader(self.paths)
        reader.skip(self.start)
        most = None if self.stop is None else self.stop - self.start
        return reader.skip(most)

    def fingerprint(self, rows: int | None = None) -> Fingerprint:
        """Return the fingerprint of all lines, or of those up to row `rows`. Reads them through, fast.

        A log that lines were appended to has the fingerprint that it had, for the rows that it had.
        """
        rows = None if rows is None else whole("rows", rows)
        reader = Reader(self.paths, summed=True)
        passed = reader.skip(rows)
        return Fingerprint(passed, reader.crc32c())

    def __iter__(self) -> Iterator[Batch]:
        worker, workers, passed, generator, unit = self._begin()
        if workers > _MOST_WORKERS:
            raise ValueError(f"num_workers is {workers}; at most {_MOST_WORKERS} are supported.")
        info = get_worker_info()
        row = 1 + worker if info else 0
        for shared in (self._counts, self._examples):
            if shared is not None:
                shared[row] = 0
                if worker == 0:  # what earlier iterations with more workers, or with none, left
                    shared[1 + workers if info else 0 :] = 0
                    shared[0] = 0
        reader = Reader(self.paths, numbered=self.line_numbers)
        try:
            batches = self._units(reader, unit, worker, workers, generator)
            yield from itertools.islice(batches, passed, None)
        finally:
            if reader.faults:
                _logger.warning(
                    "%d malformed line%s skipped; first: %s",
                    reader.faults,
                    "" if reader.faults == 1 else "s",
                    "; ".join(self._examples_of(row)),
                )

    def _units(
        self,
        reader: Reader,
        unit: int,
        worker: int,
        workers: int,
        generator: np.random.Generator | None,
    ) -> Iterator[Batch]:
        labels = self.labels
        if labels == "auto":
            labels = reader.first_line_columns() != len(CATEGORIES) + len(DENSE)
        reader.skip(self.start)
        position = self.start
        ahead = worker * unit
        while True:
            if self.stop is not None:
                ahead = min(ahead, self.stop - position)
            if reader.skip(ahead) < ahead:
                return
            position += ahead
            most = unit if self.stop is None else min(unit, self.stop - position)
            lines, rows, block = reader.read(most, labels, self._fault)
            if lines == 0:
                return
            position += lines
            if generator is not None:
                block = block.permuted(generator.permutation(rows))
            for at in range(0, rows, self.batch_size):
                end = min(at + self.batch_size, rows)
                # Only the unit that the data end in covers fewer lines than it could.
                if self.drop_last and end - at < self.batch_size and lines < unit:
                    return
                yield block.batch(at, end)
            ahead = (workers - 1) * unit

    def _fault(self, reader: Reader, message: str) -> None:
        if self._counts is None:
            raise DataError(message)
        info = get_worker_info()
        row = 1 + info.id if info else 0
        reader.faults += 1
        self._counts[row] += 1
        if reader.faults <= _KEPT_EXAMPLES:
            assert self._examples is not None
            examples = "\n".join([*self._examples_of(row), message]).encode()[:_EXAMPLE_BYTES]
            self._examples[row, : len(examples)] = torch.frombuffer(
                bytearray(examples), dtype=torch.uint8
            )

    def _part(self, begin: int, end: int, *, is_test: bool) -> CriteoLog:
        return CriteoLog(
            self.paths,
            self.batch_size,
            on_error=self.on_error,
            drop_last=self.drop_last and not is_test,
            rows=(begin, end),
            shuffle=0 if is_test else self.shuffle,
            labels=self.labels,
            line_numbers=self.line_numbers,
            seed=self.seed,
        )
