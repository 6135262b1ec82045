"""Checksums of samples, however they were read."""

from __future__ import annotations

import numpy as np
from torch import Tensor

import hotbed._core as _core
from hotbed.data.blocks import Block, Value
from hotbed.jagged import Jagged

__all__ = ["Checksums"]


class Checksums:
    """CRC-32C of each entry of batches, independent of where blocks begin and end."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums: dict[str, int] = {}

    def add(self, block: Block) -> None:
        """Take in the samples of a block, which follow those before."""
        self.rows += block.rows
        for name, ids in zip(block.names, block.ids, strict=True):
            self._add(name, ids)
        for name, value in block.values.items():
            for part, array in _arrays(value):
                self._add(name + part, array)

    def crc32c(self) -> int:
        """The checksum of all checksums and the names that they are of."""
        text = repr(sorted(self._sums.items())).encode()
        return int(_core.crc32c(np.frombuffer(text, np.uint8), 0))

    def _add(self, name: str, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self._sums[name] = int(_core.crc32c(data, self._sums.get(name, 0)))


def _arrays(value: Value) -> list[tuple[str, np.ndarray]]:
    if isinstance(value, Tensor):
        return [("", value.numpy())]
    if isinstance(value, Jagged):
        return [("\0ids", value.values.numpy()), ("\0lengths", value.lengths.numpy())]
    pieces = [text.encode() for text in value]
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    return [
        ("\0text", np.frombuffer(b"".join(pieces), np.uint8)),
        ("\0lengths", lengths),
    ]
