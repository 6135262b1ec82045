"""A batch whose rows were fetched from their owners, and lie beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hotbed.dist.exchanged_values import KeptLookup, PendingOnRanks
from hotbed.places.host.batch import HostBatch, HostPendingGradient
from hotbed.table.gradients import GradientRows

__all__ = ["RowsBatch", "ShardedPendingGradient"]


class RowsBatch(HostBatch):
    """Its rows lie beside it as long as it does.

    Attributes:
        lookup: which the ranks keep for its gradients; only where they are wanted.
    """

    lookup: KeptLookup
    has_own_rows = True

    def copy_messages(self) -> None:
        """As of `BagsBatch`; rows are copies already."""

    @property
    def claim(self) -> RowsBatch:
        """The batch itself: while it lives, ranks keep its `KeptLookup`, and owners its rows."""
        return self

    def backward(self, grads: Sequence[Tensor | None]) -> Any:
        return ShardedPendingGradient(super().backward(grads), self.lookup.first_slots)


class ShardedPendingGradient(PendingOnRanks):
    """Gradients of one backward, by slots of `Sharded`: `first_slots` of a table plus the batch's own."""

    def __init__(self, left: HostPendingGradient, first_slots: Sequence[int]) -> None:
        self._left, self._first_slots = left, first_slots
        self.places = left.places

    def shares(self, tables: Sequence[int]) -> list[GradientRows]:
        shares = self._left.shares(tables)
        if not any(self._first_slots):
            return shares
        return [
            share._replace(slots=share.slots + self._first_slots[t])
            for t, share in zip(tables, shares, strict=True)
        ]

    def slots(self, table: int) -> Tensor:
        return self._left.slots(table) + self._first_slots[table]
