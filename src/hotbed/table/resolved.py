"""A resolved batch: made by `Lookups`, pooled by `hotbed.group.pool`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hotbed.inputs.bags import Bags
from hotbed.table.backward import PendingGradient, UpdatedTable
from hotbed.table.described import DescribedTable
from hotbed.table.locks import HeldTable

__all__ = ["Columns", "PooledTable", "Resolved"]


class PooledTable(HeldTable, UpdatedTable, DescribedTable, Protocol):
    """A live table whose rows are pooled."""

    @property
    def generation(self) -> int: ...
    def note_writes(self) -> bool: ...


class Columns(NamedTuple):
    """Where the vectors of some features are written: side by side in one buffer."""

    buffer: Tensor
    """(vectors, sum of dims), contiguous."""
    features: Sequence[int]
    parts: Sequence[Tensor]
    """(vectors, dim) of each."""


class Resolved(Protocol):
    """A batch whose positions have slots: what a place of rows makes, and pool works on.

    Attributes:
        live: the tables.
        table_of: for each feature, the position of its table in `live`.
        bags: the features' inputs.
        weights: of each feature, as autograd knows them; or None.
        wants_gradient: whether it was resolved for a backward.
        has_own_rows: whether rows are copies, which no step changes.
    """

    has_own_rows: bool

    @property
    def live(self) -> Sequence[PooledTable]: ...
    @property
    def table_of(self) -> Sequence[int]: ...
    @property
    def bags(self) -> Sequence[Bags]: ...
    @property
    def weights(self) -> Sequence[Tensor | None]: ...
    @property
    def wants_gradient(self) -> bool: ...

    def dtype_of(self, table: PooledTable) -> torch.dtype:
        """Return the dtype of its vectors."""

    def empty(self, vectors: int, dim: int, dtype: torch.dtype) -> Tensor:
        """A buffer to write to."""

    def pool(self, columns: Sequence[Columns]) -> None:
        """Writes the vectors of all features."""

    def keep_inputs(self) -> None:
        """A backward will ask for gradients of weights: inputs may change until then."""

    def backward(self, grads: Sequence[Tensor | None]) -> PendingGradient:
        """Return the pending gradient of the tables for gradients of vectors, None where there is none."""

    def weight_gradients(
        self, left: Any, outputs: dict[int, Tensor], wanted: Sequence[int]
    ) -> list[Tensor]:
        """Return the gradients of the weights of the features `wanted`, by what `backward` has returned.

        Args:
            outputs: vectors of the features whose bags were divided.
        """
