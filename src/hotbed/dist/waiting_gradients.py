"""Gradients of tables that ranks share, as they wait on a rank."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from hotbed.dist.bags import BagGradients
from hotbed.dist.shards import ShardedPlace, TableOnRanks
from hotbed.dist.waiting import AtOwners, Waiting
from hotbed.places.host.step import rows_of
from hotbed.table.gradients import GradientRows, WaitingGradient
from hotbed.table.sparse_gradient import set_gradient, stored_gradient

__all__ = ["WaitingOnRanks", "waiting_of"]


class WaitingOnRanks(WaitingGradient):
    """Gradients that wait on this rank, and those that ranks have brought to its shards.

    `at_owners`: of what clipping has brought to the owners, who have it until zero_grad().
    """

    def __init__(self, place: ShardedPlace, of_ranks: Waiting) -> None:
        """`of_ranks`: which tells the others of gradients at their owners."""
        super().__init__()
        self._place, self._of_ranks = place, of_ranks
        self.at_owners = AtOwners.NOTHING

    def drop(self, handle: Tensor) -> None:
        super().drop(handle)
        if self.at_owners:
            self.follow(AtOwners.NOTHING)

    def collect(self, handle: Tensor) -> None:
        """The owners have it."""
        super().drop(handle)
        self._become(AtOwners.ROWS)

    def follow(self, state: AtOwners) -> None:
        if state < self.at_owners:  # the owners on this rank have nothing any more
            for live in self._place.own.values():
                live.drop_gradient()
            self._become(state)

    def _become(self, state: AtOwners) -> None:
        self.at_owners = state
        if state:
            self._of_ranks.clipped[self._place.number] = self
        else:
            self._of_ranks.clipped.pop(self._place.number, None)

    def replace(self, handle: Tensor, grad: Tensor | None) -> None:
        is_same = grad is not None and grad is stored_gradient(handle)
        super().replace(handle, grad)
        if self.at_owners and not is_same:
            self.follow(AtOwners.NOTHING)

    def put(self, handle: Tensor, share: GradientRows) -> None:
        """Keep the same gradient in other slots."""
        with self._lock:
            self.shares, self.sources, self._summed = [share], [], None
            set_gradient(handle, None)

    def look(self, handle: Tensor, *, each_once: bool = False) -> Tensor | None:
        with self._lock:
            self._sum_bags()
            return super().look(handle, each_once=each_once)

    def in_rows(self, live: TableOnRanks) -> GradientRows | None:
        """The gradient as rows; None: there is none."""
        with self._lock:
            self._sum_bags()
            return rows_of(live)

    @property
    def lies_elsewhere(self) -> bool:
        """True if some of it is of bags whose ids lie on other ranks."""
        for share in self.shares:
            if isinstance(share, BagGradients) and not share.batch.lookup.has_ids:
                return True
        return False

    def _sum_bags(self) -> None:
        """Have all that backwards left as rows, where owners would take it as gradients of bags."""
        self.shares = [
            share.in_rows() if isinstance(share, BagGradients) else share for share in self.shares
        ]

    def by_bags(self, handle: Tensor) -> list[BagGradients] | None:
        """All that backwards left, where it is of bags, and each of another lookup; else None."""
        if not self.shares or type(self.shares[0]) is not BagGradients:
            return None
        shares = [share for share in self.shares if isinstance(share, BagGradients)]
        if len(shares) < len(self.shares) or self.sources or stored_gradient(handle) is not None:
            return None
        return shares if len({id(share.batch) for share in shares}) == len(shares) else None

    def zero(self, handle: Tensor) -> None:
        waits = self.waits(handle)
        self.drop(handle)
        if waits:
            self._become(AtOwners.EMPTY)

    def waits(self, handle: Tensor) -> bool:
        return bool(self.at_owners) or super().waits(handle)


def waiting_of(live: TableOnRanks) -> WaitingOnRanks:
    """Return what waits for the step of a table that ranks share."""
    return cast(WaitingOnRanks, live.waiting)
