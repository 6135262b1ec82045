"""A batch across ranks: distinct ids to their owners, rows back, and later gradients the same way.

Messages are written and read by the core, all tables at once (`csrc/exchange`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.errors import PeerError
from hotbed.dist.ranks import Ranks
from hotbed.dist.wire import block, rounded
from hotbed.errors import TableError
from hotbed.group.lookup import looked_up
from hotbed.inputs.bags import FlatIds
from hotbed.table.gradients import GradientRows
from hotbed.table.lookups import Call

__all__ = ["Given", "Exchange"]

_NO_IDS = torch.empty(0, dtype=torch.int64)


class Given(NamedTuple):
    """Rows of a table, or their gradients, for its owners."""

    rows: Tensor
    """(n, dim)."""
    slots: Tensor | None = None
    """(n,) int64, each at most once: row i belongs to the id number slots[i] - first of those asked for, and
    ids without one get zeros. None: each id has one, in their order."""
    first: int = 0


_NOTHING_GIVEN = 0, 0, 0, 0


class Exchange:
    """One batch of tables of the same ranks.

    Attributes:
        layout: of the tables.
        counts: distinct ids of each table.
        numbers: what the other ranks must know of them.
        moved: (ids,) int64 where the ids of each table, one table after the other, have gone in `asked`.
        exchange: the core's, once all ranks have told their numbers.
        first_slots: of the slots that the ids of each table have in its place, if a gradient may come.
    """

    exchange: _core.Exchange
    first_slots: list[int]

    def __init__(self, ranks: Ranks, places: Sequence[Any], ids: Sequence[Tensor]) -> None:
        """`ids`: (n,) int64 of each table, in any order."""
        counts = [some.shape[0] for some in ids]
        self._announce(ranks, places, torch.cat([_NO_IDS, *ids]), counts)

    @classmethod
    def of_batch(cls, ranks: Ranks, places: Sequence[Any], batch: Any) -> tuple[Exchange, Tensor]:
        """The distinct ids of a core's batch, and for each position of each table, feature after feature,
        which of them it has."""
        distinct, inverse = (torch.empty(batch.positions, dtype=torch.int64) for _ in range(2))
        counts = _core.distinct_ids(batch, distinct.data_ptr(), inverse.data_ptr())
        made = cls.__new__(cls)
        made._announce(ranks, places, distinct, counts)
        return made, inverse

    def _announce(
        self, ranks: Ranks, places: Sequence[Any], ids: Tensor, counts: list[int]
    ) -> None:
        # The ranks keep it while it waits: in a circle, a model that goes would leave its tables behind.
        self.ranks = weakref.proxy(ranks)
        self.layout, self.counts = ranks.layout(places), counts
        self._flat, self.moved = (torch.empty(sum(counts), dtype=torch.int64) for _ in range(2))
        to = self._flat.data_ptr(), self.moved.data_ptr()
        self.numbers: list[int] = self.layout.core.deal(ids.data_ptr(), counts, *to)
        self._resolved: Any = None
        self._generations: list[int] = []

    @functools.cached_property
    def asked(self) -> Sequence[Tensor]:
        """(n,) int64 distinct ids of each table, ordered by their owners where rows are dealt out."""
        return self._flat.split(self.counts)  # type: ignore[no-untyped-call,no-any-return]

    def asked_of(self, s: int) -> slice:
        """Positions in `asked` of the ids that shard `s` of the only table has."""
        begin = self.exchange.begin(self.ranks.rank, s)
        return slice(begin, begin + self.exchange.count(self.ranks.rank, s))

    def renumbered(self, t: int, positions: Tensor) -> Tensor:
        """Return positions in `asked` of positions among the ids that were given."""
        begin = sum(self.counts[:t])
        return self.moved[begin : begin + self.counts[t]][positions]

    def wait(self, batch: Any) -> None:
        """Stays for the gradients of a batch; None: this rank has none."""
        self.first_slots = [0] * len(self.counts)
        sought = self.layout.position
        for trip in reversed(self.ranks.waiting.trips):  # the last of each table has the last slots
            there = trip.layout.position
            for number in sought.keys() & there.keys():
                t = there[number]
                self.first_slots[sought[number]] = trip.first_slots[t] + trip.counts[t]
            sought = {number: t for number, t in sought.items() if number not in there}
            if not sought:
                break
        self.ranks.waiting.add(batch, self)

    # -- rows to who asks ------------------------------------------------------------------------

    def fetch(self, told: Tensor, frozen: Sequence[int], training: bool) -> list[Tensor]:
        """Messages with the rows of all tables, which stay until the ranks next send something. Called by
        all ranks.

        Args:
            told: (ranks, n) the `numbers` of each.
            frozen: positions of tables that take no new rows.
            training: whether new ids of the others get one.
        """
        ids = self._ids_to_owners(told)
        outgoing, coming = self.exchange.row_sizes()
        messages = self._take(outgoing)
        fault: Exception | None = None
        try:
            self._look_up(ids, messages, frozen, training)
        except Exception as error:
            fault = error
        return self._send("rows", messages, coming, fault)

    def fetched(self, messages: Sequence[Tensor]) -> _core.FetchedRows:
        """The rows in messages that `fetch` has returned, for a batch."""
        kept = self.layout.fetched
        found = kept.pop() if kept else _core.FetchedRows(self.layout.core)
        found.take(self.exchange, self._flat.data_ptr(), _addresses(messages))
        return found

    def _look_up(
        self, ids: Tensor, messages: Sequence[Tensor], frozen: Sequence[int], training: bool
    ) -> None:
        """Look up the rows that this rank owns.

        Args:
            ids: of each of its shards, those of one rank after the other's.
            messages: of each rank, where its rows go; empty: no rows are wanted.
        """
        layout, own = self.layout, self.layout.own()
        if not own:
            return
        never = set(frozen)
        here = [at for at, t in enumerate(layout.own_tables) if t in never] if never else []
        bags = FlatIds(ids, self.exchange.asked_here())
        call = Call(own, layout.table_of, layout.names, bags, here, training)
        places = wide = None
        if messages:
            wide = block(self.exchange.wide_bytes)
            places = self.exchange.row_places(_addresses(messages), wide.data_ptr())
        self._resolved = looked_up(call, places)
        self._generations = [live.generation for live in own]
        if wide is not None and len(wide):
            self.exchange.narrow(wide.data_ptr(), _addresses(messages))

    def take_over(self, told: Tensor) -> None:
        """Resolve the ids at their owners, for gradients that other trips have left. Called by all ranks.

        Args:
            told: (ranks, n) the `numbers` of each.
        """
        self._look_up(self._ids_to_owners(told), [], [], False)

    # -- gradients to owners ---------------------------------------------------------------------

    def give(
        self, grads: Sequence[Given | None], wanted: Sequence[int]
    ) -> list[tuple[Any, GradientRows]]:
        """Bring gradients to the owners and return their means, of each shard of this rank. Called by all
        ranks.

        Args:
            grads: of each table, of the compute dtype; None: zeros.
            wanted: positions of the tables of which a rank has a gradient.
        """
        layout, chosen = self.layout, [False] * len(self.counts)
        for t in wanted:
            chosen[t] = True
        received = self._give("gradients", grads, chosen, stored=False)
        mine = [at for at, t in enumerate(layout.own_tables) if chosen[t]]
        if not mine:
            return []
        own = layout.own()
        for live, generation in zip(own, self._generations, strict=True):
            if live.generation != generation:
                raise TableError(
                    f"Table {live.name!r}: rows were erased since a batch was looked up whose gradient now "
                    "comes. Erase between steps."
                )
        places = self.exchange.given_places(chosen, False, _addresses(received))
        left = self._resolved.left(places, received)
        shares = left.shares(mine, divisor=self.ranks.size)
        return [(own[at], share) for at, share in zip(mine, shares, strict=True)]

    # -- rows to their owners --------------------------------------------------------------------

    def deliver(self, told: Tensor, rows: Tensor | None) -> list[tuple[Any, Tensor, Tensor | None]]:
        """Bring rows of one table to their owners. Called by all ranks.

        Args:
            told: (ranks, n) the `numbers` of each.
            rows: (n, dim), as they are stored, of the ids as they were given; None: only the ids travel.

        Returns:
            For each shard of this rank: its live table, (m,) its ids, one rank's after the other's, and
            (m, columns) rows.
        """
        size = self.ranks.size
        flat = self._ids_to_owners(told)
        counts = self.exchange.asked_here()
        of_shards = [counts[at : at + size] for at in range(0, len(counts), size)]
        ids = flat.split([sum(some) for some in of_shards])  # type: ignore[no-untyped-call]
        own = self.layout.own()
        if rows is None:
            return [(live, some, None) for live, some in zip(own, ids, strict=True)]
        given = Given(rows.contiguous(), self.moved)
        received, begins = self._give("rows", [given], [True], stored=True), [0] * size
        found: list[tuple[Any, Tensor, Tensor | None]] = []
        for live, some, of_ranks in zip(own, ids, of_shards, strict=True):
            pieces, dim = [], live.spec.dim
            for rank, count in enumerate(of_ranks):
                begin, length = begins[rank], count * dim * rows.itemsize
                piece: Any = received[rank][begin : begin + length]
                pieces.append(piece.view(rows.dtype).view(count, dim))
                begins[rank] += rounded(length)
            found.append((live, some, torch.cat(pieces)))
        return found

    # -- messages --------------------------------------------------------------------------------

    def _ids_to_owners(self, told: Tensor) -> Tensor:
        """(any,) ids asked of each shard of this rank, as it calls them, one rank's after the other's."""
        told = told.contiguous()
        self.exchange = _core.Exchange(self.layout.core, told.data_ptr())
        asked = self._flat.data_ptr()
        outgoing, coming = self.exchange.id_sizes()
        messages = self._take(outgoing)
        self.exchange.write_ids(asked, _addresses(messages))
        received = self._send("ids", messages, coming)
        ids = torch.empty(sum(coming) // 8, dtype=torch.int64)
        self.exchange.take_ids(asked, _addresses(received), ids.data_ptr())
        return ids

    def _give(
        self, what: str, given: Sequence[Given | None], chosen: list[bool], *, stored: bool
    ) -> list[Tensor]:
        """The messages that came. `chosen`: of which tables something travels."""
        outgoing, coming = self.exchange.given_sizes(chosen, stored)
        messages = self._take(outgoing)
        places = [
            _NOTHING_GIVEN
            if one is None
            else (
                0 if one.slots is None else one.slots.data_ptr(),
                one.rows.data_ptr(),
                one.rows.shape[0],
                one.first,
            )
            for one in given
        ]
        self.exchange.write_given(chosen, stored, places, _addresses(messages))
        return self._send(what, messages, coming)

    def _take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for messages to all ranks, this one among them."""
        own = self.ranks.rank
        messages: list[Tensor] = self.ranks.take(
            [0 if r == own else n for r, n in enumerate(sizes)]
        )
        messages[own] = block(sizes[own])
        return messages

    def _send(
        self,
        what: str,
        messages: Sequence[Tensor],
        coming: Sequence[int],
        fault: Exception | None = None,
    ) -> list[Tensor]:
        own = self.ranks.rank
        sizes = [0 if r == own else size for r, size in enumerate(coming)]
        received: list[Tensor] = self.ranks.send(what, sizes, fault)
        received[own] = messages[own]
        for rank, (message, size) in enumerate(zip(received, coming, strict=True)):
            if len(message) != size:  # the core would read beyond it
                raise PeerError(
                    f"Rank {rank} sent {len(message)} bytes of {what} where it had announced {size}."
                )
        return received


def _addresses(messages: Sequence[Tensor]) -> list[int]:
    return [message.data_ptr() for message in messages]
