"""Values of a lookup across ranks, which steps of `hotbed.dist.exchange` hand on; there is `Fetched`, too."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from hotbed import _core
from hotbed.dist.layout import Layout
from hotbed.places.host.batch import HostBatch

__all__ = ["Requests", "IdsByOwner", "KeptLookup", "OwnedRows"]


@dataclasses.dataclass(frozen=True, slots=True)
class IdsByOwner:
    """Distinct ids that this rank asks for. Nothing has travelled yet."""

    layout: Layout
    ids: Tensor
    """(n,) int64 of one table after the other, ordered by their owners where rows are split."""
    counts: list[int]
    """Ids of each table."""
    new_positions: Tensor
    """(n,) int64: the position among the `ids` of its table that each id has gone to."""
    counts_to_owners: list[int]
    """Counts for the handshake before `send_ids`: of a table whose rows are split, ids for each rank; of
    another one, all ids, as one number."""

    def of_table(self, t: int) -> Tensor:
        """(n,) ids of one table."""
        return self._of(self.ids, t)

    def renumbered(self, t: int, positions: Tensor) -> Tensor:
        """Return positions in `of_table` of positions among the ids that were given."""
        return self._of(self.new_positions, t)[positions]

    def _of(self, numbers: Tensor, t: int) -> Tensor:
        begin = sum(self.counts[:t])
        return numbers[begin : begin + self.counts[t]]


@dataclasses.dataclass(frozen=True, slots=True)
class Requests:
    """Ids that all ranks ask for, at their owners."""

    by_owner: IdsByOwner
    core: _core.Exchange
    """Knows how many ids each rank asks of each shard."""
    ids_here: Tensor
    """(n,) int64 ids asked of the shards of this rank, numbered as in the shard, (id - first) / stride: those
    of the first shard, one requesting rank after the other, then those of the next. Ids that several ranks
    ask for occur once for each."""

    def requests_of(self, rank: int, s: int) -> slice:
        """Positions, among the ids that `rank` asks of the only table, of those that shard `s` has."""
        begin = self.core.begin(rank, s)
        return slice(begin, begin + self.core.count(rank, s))


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedRows:
    """Rows of the shards of this rank that all ranks ask for; it holds them where they are."""

    resolved: HostBatch
    generations: list[int]
    """Of the shards: slots of an earlier one mean nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptLookup:
    """A lookup whose gradients may come, as ranks keep it until no rank has its batch any more."""

    requests: Requests
    owned: OwnedRows | None
    first_slots: list[int]
    """For each table, the slot in `Sharded` of the first of its ids; the id number i of a table has the slot
    first_slots[t] + i. Ids of all waiting lookups of a table have slots of their own."""

    @property
    def layout(self) -> Layout:
        return self.requests.by_owner.layout

    @property
    def counts(self) -> list[int]:
        """Ids of each table."""
        return self.requests.by_owner.counts
