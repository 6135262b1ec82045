"""Lines of click logs: passed over, or parsed into arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import hotbed._core as _core
from hotbed.data.lines import line_blocks

__all__ = ["CATEGORIES", "COLUMNS", "DENSE", "WANTED", "Batch", "Block", "Reader"]

DENSE = tuple(f"I{i}" for i in range(1, 14))
"""Names of the columns of numbers in a Criteo log: I1 to I13."""
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
"""Names of the columns of categories in a Criteo log: C1 to C26."""

Batch = dict[str, torch.Tensor]
"""Entries by name; a `Jagged`, and the list of strings of a `Key`, pass for tensors here."""

COLUMNS = ("label", *DENSE, *CATEGORIES)
_ROOM = 1 << 17
"""Rows for which there is room at first: a batch, or a window, may be larger than what the files hold."""
WANTED = {
    2: "0 or 1",
    3: "an integer of at most 18 digits",
    4: "8 hexadecimal digits",
}


class Block(NamedTuple):
    """Room for rows, filled from the front."""

    label: NDArray[np.float32] | None
    line: NDArray[np.int64] | None
    """Their numbers, if they are asked for."""
    dense: NDArray[np.float32]
    ids: NDArray[np.int64]

    @classmethod
    def empty(cls, rows: int, labels: bool, numbered: bool) -> Block:
        return cls(
            np.empty(rows, np.float32) if labels else None,
            np.empty(rows, np.int64) if numbered else None,
            np.empty((rows, len(DENSE)), np.float32),
            np.empty((len(CATEGORIES), rows), np.int64),
        )

    @property
    def room(self) -> int:
        return len(self.dense)

    def grown(self, rows: int) -> Block:
        """Room for so many rows, which begin with these."""
        larger = Block.empty(rows, self.label is not None, self.line is not None)
        for old, new in zip(self, larger, strict=True):
            if old is not None and new is not None:
                (new[:, : self.room] if old is self.ids else new[: self.room])[...] = old
        return larger

    def permuted(self, order: np.ndarray) -> Block:
        label = None if self.label is None else self.label[order]
        line = None if self.line is None else self.line[order]
        return Block(label, line, self.dense[order], np.take(self.ids, order, axis=1))

    def batch(self, begin: int, end: int) -> Batch:
        batch: Batch = {}
        if self.label is not None:
            batch["label"] = torch.from_numpy(self.label[begin:end])
        if self.line is not None:
            batch["line"] = torch.from_numpy(self.line[begin:end])
        batch["dense"] = torch.from_numpy(self.dense[begin:end])
        ids = torch.from_numpy(np.ascontiguousarray(self.ids[:, begin:end]))
        batch.update(zip(CATEGORIES, ids.unbind(0), strict=True))
        return batch


class Reader:
    """A position in a sequence of files: passes rows or parses them. For one thread.

    Args:
        summed: keep a checksum of what is passed, for `crc32c`.
        numbered: number the rows that are read.
    """

    def __init__(self, paths: list[str], *, summed: bool = False, numbered: bool = False) -> None:
        self.faults = 0
        self._numbered = numbered
        self._lines_before = 0
        """Lines in the files before this one."""
        self._summed = summed
        self._sum = 0
        self._open_line = False
        """The lines that are summed up do not end in a line feed."""
        self._paths = iter(paths)
        self._blocks: Iterator[bytes] = iter(())
        self._path = ""
        self._line = 0
        self._text = b""
        self._at = 0

    def skip(self, most: int | None) -> int:
        """Pass up to `most` rows (None: all); returns how many there were."""
        passed = 0
        while (most is None or passed < most) and self._more():
            room = len(self._text) if most is None else min(most - passed, len(self._text))
            rows, lines, size, *_ = _core.criteo_skip(self._text, self._at, room)
            if self._summed:
                self._add(self._text, self._at, size)
            passed += rows
            self._line += lines
            self._at += size
        return passed

    def crc32c(self) -> int:
        """The CRC32C of all lines that were passed. The last line of a file has a line feed here, also
        where it has none there: lines that are appended later must not change it."""
        if self._open_line:
            self._add(b"\n", 0, 1)
        return self._sum

    def _add(self, text: bytes, at: int, size: int) -> None:
        self._sum = _core.crc32c(np.frombuffer(text, np.uint8, size, at), self._sum)
        self._open_line = not text.endswith(b"\n", at, at + size)

    def read(
        self, most: int, labels: bool, on_fault: Callable[[Reader, str], None]
    ) -> tuple[int, int, Block]:
        """Parse up to `most` rows: (rows passed, rows parsed, where they are)."""
        block = Block.empty(min(most, _ROOM), labels, self._numbered)
        passed = parsed = 0
        while passed < most and self._more():
            at = self._at
            if parsed == block.room:
                block = block.grown(min(2 * parsed, parsed + most - passed))
            room = min(most - passed, len(self._text))
            rows, lines, size, fault, column, begin, end = _core.criteo_parse(
                self._text, at, room, block.label, block.dense, block.ids, parsed
            )
            if block.line is not None:
                block.line[parsed : parsed + rows] = self._numbers(at, size, rows, lines)
            parsed += rows
            passed += rows + (fault != 0)
            self._line += lines
            self._at += size
            if fault:
                field = self._text[at + begin : at + end]
                on_fault(self, self._message(fault, column, field, labels))
        return passed, parsed, block

    def _numbers(self, at: int, size: int, rows: int, lines: int) -> np.ndarray:
        """The numbers of the next rows, from 1 over all files, among so many lines."""
        first = self._lines_before + self._line + 1
        if lines == rows:
            return np.arange(first, first + rows)
        found = self._text[at : at + size].split(b"\n")
        blank = np.array([line in (b"", b"\r") for line in found])
        return np.flatnonzero(~blank)[:rows] + first

    def first_line_columns(self) -> int:
        """Columns of the next line that is not blank, which stays unread; 0 at the end."""
        while self._more():
            _, lines, size, *_ = _core.criteo_skip(self._text, self._at, 1)
            line = self._text[self._at : self._at + size].strip(b"\r\n")
            if line:
                return line.count(b"\t") + 1
            self._line += lines
            self._at += size
        return 0

    def _more(self) -> bool:
        while self._at == len(self._text):
            block = next(self._blocks, None)
            if block is None:
                path = next(self._paths, None)
                if path is None:
                    return False
                self.crc32c()  # ends the last line of the file before
                self._lines_before += self._line
                self._path, self._line = path, 0
                self._blocks = line_blocks(path, _core.CRITEO_LONGEST_LINE)
                block = b""
            self._text, self._at = block, 0
        return True

    def _message(self, fault: int, column: int, field: bytes, labels: bool) -> str:
        where = f"{self._path}, line {self._line}: "
        if fault == 5:
            return f"{where}longer than {_core.CRITEO_LONGEST_LINE} bytes; not a click log?"
        if fault == 1:
            wanted = len(COLUMNS) - (not labels)
            about = "label, 13 integers, 26 categories" if labels else "13 integers, 26 categories"
            remedy = ""
            if {column, wanted} == {39, 40}:
                remedy = (
                    " Pass labels=False for lines without a label; training needs one."
                    if labels
                    else " Pass labels=True for lines with a label."
                )
            return f"{where}{column} columns, expected {wanted} ({about}).{remedy}"
        shown = repr(field[:40].decode("utf-8", "backslashreplace"))
        dots = "..." if len(field) > 40 else ""
        return f"{where}column {COLUMNS[column]} holds {shown}{dots}, not {WANTED[fault]}."
