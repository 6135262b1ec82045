"""Samples on their way from Arrow columns to batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data.criteo_lines import Batch
from hotbed.jagged import Jagged

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Block", "Builder", "Columns", "Value"]

Value: TypeAlias = "Tensor | Jagged | list[str]"
"""One entry of a batch, of as many samples as the others."""
Columns: TypeAlias = "dict[str, pa.Array]"
"""Columns of a file by name, of as many rows each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Samples of which batches are cut."""

    rows: int
    names: tuple[str, ...]
    """Features of one id a sample."""
    ids: NDArray[np.int64]
    """(len(names), rows). NumPy copies on one thread; torch's would wait for each other in small pieces."""
    values: dict[str, Value]
    """Everything else, by its name in a batch."""

    def permuted(self, order: NDArray[np.int64]) -> Block:
        """The samples at (n,) positions, in that order."""
        values = {name: _at(value, order) for name, value in self.values.items()}
        return Block(len(order), self.names, np.take(self.ids, order, axis=1), values)

    def cut(self, begin: int, end: int) -> Block:
        """The samples from `begin` to before `end`, which share memory with these."""
        values: dict[str, Value] = {name: v[begin:end] for name, v in self.values.items()}
        return Block(end - begin, self.names, self.ids[:, begin:end], values)

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """The samples of blocks of the same schema, one block after the other."""
        first = blocks[0]
        if len(blocks) == 1:
            return first
        values = {name: _joined([block.values[name] for block in blocks]) for name in first.values}
        ids = np.concatenate([block.ids for block in blocks], axis=1)
        return cls(sum(block.rows for block in blocks), first.names, ids, values)

    def batch(self, begin: int, end: int) -> Batch:
        """A batch of the samples from `begin` to before `end`. Its ids lie in one block of memory."""
        part = self.cut(begin, end)
        ids = torch.from_numpy(np.ascontiguousarray(part.ids)).unbind(0)
        return {**cast(Batch, part.values), **dict(zip(self.names, ids, strict=True))}


class Builder:
    """Collects what columns give of some rows.

    Args:
        rows: how many there are.
        squeezed: keys of matrices that become (rows,) where they have one column.
    """

    def __init__(self, rows: int, squeezed: frozenset[str] = frozenset()) -> None:
        self.rows = rows
        self._squeezed = squeezed
        self._matrices: dict[str, list[NDArray[np.float32]]] = {}
        self._ids: dict[str, NDArray[np.int64]] = {}
        self._values: dict[str, Value] = {}

    def number(self, key: str, values: NDArray[np.float32]) -> None:
        """Add a column to the matrix ``batch[key]``."""
        self._matrices.setdefault(key, []).append(values)

    def ids(self, name: str, values: NDArray[np.int64]) -> None:
        """Add a feature of one id a sample."""
        self._ids[name] = values

    def value(self, name: str, value: Value) -> None:
        """Add any other entry of a batch."""
        self._values[name] = value

    def block(self) -> Block:
        """Return all that was added."""
        values: dict[str, Value] = {}
        for key, columns in self._matrices.items():
            if len(columns) == 1 and key in self._squeezed:
                values[key] = torch.from_numpy(columns[0])
                continue
            matrix = np.empty((self.rows, len(columns)), np.float32)
            for at, column in enumerate(columns):
                matrix[:, at] = column
            values[key] = torch.from_numpy(matrix)
        ids = np.empty((len(self._ids), self.rows), np.int64)
        for at, feature in enumerate(self._ids.values()):
            ids[at] = feature
        return Block(self.rows, tuple(self._ids), ids, {**values, **self._values})


def _at(value: Value, order: NDArray[np.int64]) -> Value:
    if isinstance(value, list):
        return [value[at] for at in order.tolist()]
    if isinstance(value, Tensor):
        return torch.from_numpy(value.numpy()[order])
    return value[torch.from_numpy(order)]


def _joined(values: Sequence[Value]) -> Value:
    bags = [value for value in values if isinstance(value, Jagged)]
    if bags:
        return Jagged.concatenate(bags)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors:
        return torch.from_numpy(np.concatenate([tensor.numpy() for tensor in tensors]))
    return [text for value in values if isinstance(value, list) for text in value]
