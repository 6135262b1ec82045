"""Values of a lookup by ranks: what each step of `hotbed.dist.exchange` hands to the next."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from hotbed import _core
from hotbed.dist.layout import Layout
from hotbed.places.host.batch import HostBatch

__all__ = ["Announced", "Asked", "Lookup", "Owned"]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Distinct ids that this rank asks for. Nothing has travelled yet."""

    layout: Layout
    ids: Tensor
    """(n,) int64 of one table after the other, ordered by their owners where rows are dealt out."""
    counts: list[int]
    """Ids of each table."""
    moved: Tensor
    """(n,) int64: the position among the `ids` of its table that each id has gone to."""
    numbers: list[int]
    """What the other ranks must know of them, for the handshake before `announce`."""

    def of_table(self, t: int) -> Tensor:
        """(n,) ids of one table."""
        return self._of(self.ids, t)

    def renumbered(self, t: int, positions: Tensor) -> Tensor:
        """Return positions in `of_table` of positions among the ids that were given."""
        return self._of(self.moved, t)[positions]

    def _of(self, numbers: Tensor, t: int) -> Tensor:
        begin = sum(self.counts[:t])
        return numbers[begin : begin + self.counts[t]]


@dataclasses.dataclass(frozen=True, slots=True)
class Announced:
    """Ids that all ranks ask for, at their owners."""

    asked: Asked
    core: _core.Exchange
    """Knows how many ids each rank asks of each shard."""
    ids_here: Tensor
    """(n,) int64 ids asked of the shards of this rank, as these call them: of the first by each rank, then of
    the next."""

    def asked_of(self, rank: int, s: int) -> slice:
        """Positions, among the ids that `rank` asks of the only table, of those that shard `s` has."""
        begin = self.core.begin(rank, s)
        return slice(begin, begin + self.core.count(rank, s))


@dataclasses.dataclass(frozen=True, slots=True)
class Owned:
    """Rows of the shards of this rank that all ranks ask for; it holds them where they are."""

    resolved: HostBatch
    generations: list[int]
    """Of the shards: slots of an earlier one mean nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup whose gradients may come, as ranks keep it until no rank has its batch any more."""

    announced: Announced
    owned: Owned | None
    first_slots: list[int]
    """Of the slots that the ids of each table have in its place."""

    @property
    def layout(self) -> Layout:
        return self.announced.asked.layout

    @property
    def counts(self) -> list[int]:
        """Ids of each table."""
        return self.announced.asked.counts
