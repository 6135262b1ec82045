"""Values of a lookup across ranks, which steps of `hotbed.dist.exchange` hand on; there is `Fetched`, too."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, NoReturn, Protocol, cast

from torch import Tensor

from hotbed import _core
from hotbed.dist.layout import Layout
from hotbed.dist.raw import Messenger
from hotbed.errors import OptimizerError, TableError
from hotbed.places.host.batch import FlatInputs, HostBatch
from hotbed.table.gradients import GradientRows
from hotbed.table.live import LiveTable

__all__ = [
    "Answer",
    "Gathering",
    "IdsByOwner",
    "KeptLookup",
    "OwnedInputs",
    "OwnedRows",
    "PendingOnRanks",
    "Requests",
]


class PendingOnRanks:
    """Base of the gradients of one backward for tables that ranks share."""

    def step(self, updates: object) -> NoReturn:
        raise OptimizerError("fused=True updates tables in backward, which ranks cannot agree on.")


class Gathering(Messenger, Protocol):
    """Gathers numbers, too: `hotbed.dist.ranks.Ranks`, and `Rounds`."""

    def gather(self, own: Sequence[int]) -> Tensor:
        """(ranks, n) int64: the numbers of each rank, as many of each."""


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

    def sums(
        self,
        places: _core.VectorPlaces,
        held: Sequence[Tensor],
        shards: Sequence[int],
        divisor: int = 1,
    ) -> list[tuple[LiveTable, GradientRows]]:
        """Return the sums of gradients that came for these rows.

        Args:
            places: where they are; `held`: the tensors there.
            shards: positions of those of which any came.
            divisor: of all sums.

        Raises:
            TableError: rows were erased since the lookup.
        """
        own = self.resolved.live
        if (now := [live.generation for live in own]) != self.generations:
            at = next(at for at, n in enumerate(self.generations) if now[at] != n)
            raise TableError(
                f"Table {own[at].name!r}: rows were erased since a batch was looked up whose gradient now "
                "comes. Erase between steps."
            )
        shares = self.resolved.pending_from(places, held).shares(shards, divisor=divisor)
        return [(cast(LiveTable, own[at]), rows) for at, rows in zip(shards, shares, strict=True)]


class OwnedInputs(NamedTuple):
    """Requests of ranks to the shards of this rank."""

    layout: Layout
    bags: FlatInputs
    frozen: Sequence[int]
    """Positions of tables that take no new rows."""


class KeptLookup(abc.ABC):
    """A lookup whose gradients may come, as ranks keep it until no rank has its batch any more.

    Attributes:
        kind_given: class of the gradients of a table that `give` takes.
        layout: of its tables.
        first_slots: for each table, the slot in `Sharded` of the first of its ids; the id number i of a table
            has the slot first_slots[t] + i. Ids of all waiting lookups of a table have slots of their own.
        counts: ids of each table.
    """

    kind_given: ClassVar[type]
    layout: Layout
    first_slots: list[int]
    counts: list[int]

    @property
    def needs_seeds(self) -> bool:
        """Return True if `give` reads `seeds`, as codecs encode gradients."""
        return not self.layout.stored[1]

    @abc.abstractmethod
    def ids_of(self, t: int) -> Tensor:
        """(n,) int64 ids of one table, by their numbers."""

    @abc.abstractmethod
    def give(
        self,
        ranks: Messenger,
        given: Sequence[object],
        chosen: list[bool],
        seeds: Sequence[int],
    ) -> list[tuple[LiveTable, GradientRows]]:
        """Bring gradients to the owners and return their means, of each shard of this rank. Called by all
        ranks.

        Args:
            given: of each table, of `kind_given`; None: this rank has none.
            chosen: for each table whether a rank has a gradient of it.
            seeds: for each table, of what a codec rounds at random, the same on all ranks.

        Raises:
            TableError: rows were erased since the lookup.
        """


class Answer(Protocol):
    """Rows that this rank has asked for: `hotbed.dist.exchange.Fetched`, or what came by another route."""

    @property
    def requests(self) -> Requests: ...
    def copy_out(self) -> _core.FetchedRows: ...
    def kept(self, first_slots: list[int]) -> KeptLookup: ...
