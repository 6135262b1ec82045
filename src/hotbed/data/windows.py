"""Base of readers of rows in order, which are shuffled in windows and shared out to workers."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hotbed.data.arguments import (
    Checked,
    flag,
    one_or_more,
    real,
    seed_or_none,
    whole,
    whole_or_none,
    window,
)
from hotbed.data.criteo_lines import Batch

__all__ = ["Fingerprint", "Iteration", "SampleReader", "Skipped"]

_R = TypeVar("_R", bound="SampleReader")


class Skipped(NamedTuple):
    """Malformed lines passed over with ``on_error="skip"``."""

    lines: int
    """Number of lines, over all DataLoader workers."""
    examples: tuple[str, ...]
    """Messages for the first few of each worker."""


class Fingerprint(NamedTuple):
    """Identity of the contents of data, however the files are compressed."""

    rows: int
    crc32c: int
    """CRC-32C of the rows."""


class Iteration(NamedTuple):
    """One iteration of a reader."""

    worker: int
    """Number of this DataLoader worker, from 0."""
    workers: int
    """1 outside of workers, too."""
    passed: int
    """Batches at the beginning that are passed over."""
    generator: np.random.Generator | None
    """Draws the permutations of windows; None: rows keep their order."""
    unit: int
    """Rows of a window, or of a batch where none is shuffled."""


class SampleReader(IterableDataset[Batch]):
    """Batches of rows in order, or permuted in windows by a seed and the number of the epoch.

    In DataLoader workers worker w reads units (batches, or windows) w, w + k, ...
    """

    paths: Checked[list[str]]
    batch_size = Checked(one_or_more)
    shuffle = Checked(window)
    """Rows of a window; 0: none are shuffled."""
    seed = Checked(seed_or_none)
    drop_last = Checked(flag)
    start = Checked(whole)
    """Number of the first row over all files."""
    stop = Checked(whole_or_none)
    """Number behind the last row; None: the end of the files."""
    _epoch = _passed = 0  # of the next iteration; its batches that are passed over

    @property
    def skipped(self) -> Skipped:
        """Rows that were passed over, as they are malformed: none where that is an error."""
        return Skipped(0, ())

    @abstractmethod
    def count_rows(self) -> int:
        """Return the number of rows in range."""

    @abstractmethod
    def fingerprint(self, rows: int | None = None) -> Fingerprint:
        """Return the fingerprint of all rows, or of those up to row `rows`."""

    @abstractmethod
    def _part(self: _R, begin: int, end: int, *, is_test: bool) -> _R:
        """Return a reader of the rows from `begin` to before `end`. `is_test`: in order, all of them."""

    def __len__(self) -> int:
        """Number of batches in one iteration, if none is skipped as a whole. Counts the rows."""
        rows = self.count_rows()
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def split(self: _R, test_fraction: float, rows: int | None = None) -> tuple[_R, _R]:
        """Return (train, test): two readers with the same options; the last rows are the test rows.

        The test part is never shuffled and keeps its last batch.

        Args:
            rows: what `count_rows` returns, if it is known. Default: they are counted.

        Raises:
            InputError, ValueError: the fraction is no number in [0, 1).
        """
        fraction = real("test_fraction", test_fraction)
        if not 0 <= fraction < 1:
            raise ValueError(f"test_fraction is {test_fraction}; it must lie in [0, 1).")
        total = self.count_rows() if rows is None else whole("rows", rows)
        cut, end = self.start + total - round(total * fraction), self.start + total
        return self._part(self.start, cut, is_test=False), self._part(cut, end, is_test=True)

    def seek(self, epoch: int, batches: int = 0) -> None:
        """Begin the next iteration behind the first `batches` of `epoch` (from 1), which are not given.

        In a DataLoader with workers, pass over them there.

        Raises:
            InputError, ValueError: no such place, or rows are shuffled by no seed.
        """
        epoch, batches = whole("epoch", epoch, 1), whole("batches", batches)
        if self.shuffle and self.seed is None:
            raise ValueError(
                "Data that is shuffled by no seed has no place to go on from; give seed=."
            )
        self._epoch, self._passed = epoch - 1, batches

    def _begin(self) -> Iteration:
        """Begin an iteration; the one after is that of the next epoch."""
        epoch, passed = self._epoch, self._passed
        self._epoch, self._passed = epoch + 1, 0
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        generator, unit = None, self.batch_size
        if self.shuffle:
            if self.seed is None:
                self.seed = int(torch.randint(2**62, (), device="cpu"))
            generator = np.random.default_rng((self.seed, epoch, worker))
            unit = -(-self.shuffle // self.batch_size) * self.batch_size
        return Iteration(worker, workers, passed, generator, unit)
