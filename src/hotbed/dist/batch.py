"""A batch of tables that ranks share: rows come here, or vectors of bags that the owners have pooled.

A bag of one id is a row, and distinct rows are looked up once: they come here. Vectors of long bags are fewer
bytes than their rows. Each rank judges by the counts of its own batch; bags are pooled by owners where all
ranks would have it so.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.delivery import fetch_by_id
from hotbed.dist.errors import PeerError
from hotbed.dist.exchange import fetch, keep, order_by_owner, send_ids, send_no_ids
from hotbed.dist.handshake import Handshake
from hotbed.dist.merging import merge
from hotbed.dist.parts import PartsOfCall, parts_without_batch
from hotbed.dist.ranks import Ranks
from hotbed.dist.row_codecs import STORED
from hotbed.dist.rows_batch import RowsBatch
from hotbed.dist.shards import ShardedPlace, TableOnRanks
from hotbed.errors import TableError
from hotbed.places.host.batch import check, core_batch
from hotbed.sharding.kind import LEAST_IDS
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call, Lookups, StoredTable
from hotbed.table.resolved import Resolved

__all__ = ["ShardedLookups", "serve_lookup", "serve_rows"]

_BITS = 62
"""Of tables in a number."""
_MOST_KEPT = 2
"""Rows of batches that are gone, kept for those to come."""


class ShardedLookups(Lookups):
    """Tables that the same ranks share."""

    ranks: Ranks
    is_immediate = True  # those of the shards see to it

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def where(self) -> str:
        return f"shards of {self.ranks.size} ranks"

    def allocate(self, live: Sequence[StoredTable]) -> None:
        for own in _own(live):
            own.allocate()

    def resolve(self, call: Call) -> Resolved:
        ranks = self.ranks
        wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
        if wanted and call.training:
            _refuse_beside_dense(ranks)
        given = core_batch(call.live, call.table_of, call.bags)
        check(given, call)
        modes = [int(call.training), int(wanted), *_bits(call.frozen, len(call.live))]
        places = [live.place for live in cast(Sequence[TableOnRanks], call.live)]
        ways: list[int] | None
        ways, room = ways_of(ranks, call, places)
        begin = len(modes) + len(ways)
        while ways is not None:
            asked = (
                PartsOfCall(ranks, call, given, places, ways, _RowsOfCall)
                if any(ways)
                else _RowsOfCall(ranks, call, given, places)
            )
            told = [*modes, *ways, *asked.numbers, *[0] * (room - len(asked.numbers))]
            opened = ranks.handshake("a lookup", told, [place.number for place in places])
            _refuse_other_modes(opened, ranks.rank, len(modes))
            ways = other_ways(opened, len(modes), begin)
        made = asked.fetch(opened.values[:, begin : begin + len(asked.numbers)], wanted)
        if wanted and ranks.waiting.to_be_merged:
            made.copy_messages()
            merge(ranks)
        return made

    def stats(self, live: Sequence[StoredTable]) -> dict[str, float]:
        own = _own(live)
        return own[0].place.lookups.stats(own) if own else {}

    def flush(self, live: Sequence[StoredTable]) -> None:
        for one in _own(live)[:1]:
            one.place.lookups.flush([one])

    def note_hottest(self, live: Sequence[StoredTable]) -> None:
        for one in _own(live)[:1]:
            one.place.lookups.note_hottest([one])


def _own(live: Sequence[StoredTable]) -> list[LiveTable]:
    """Shards of these tables on this rank. They lie in one place."""
    return [
        own for table in cast(Sequence[LiveTable], live) for own in table.place.tables_here(table)
    ]


class _RowsOfCall:
    """Distinct ids of a call, whose rows are to come here.

    Attributes:
        numbers: what the other ranks must know before `fetch`.
    """

    def __init__(
        self, ranks: Ranks, call: Call, given: _core.Batch, places: Sequence[ShardedPlace]
    ) -> None:
        """`given`: the checked batch of the call; `places`: of its tables."""
        self._ranks, self._call, self._given = ranks, call, given
        ids = torch.empty(given.positions, dtype=torch.int64, device="cpu")
        self._inverse = torch.empty_like(ids)
        counts = _core.distinct_ids(self._given, ids.data_ptr(), self._inverse.data_ptr())
        self._by_owner = order_by_owner(ranks, places, ids, counts)
        self.numbers = self._by_owner.counts_to_owners

    def fetch(self, numbers: Tensor, wanted: bool) -> RowsBatch:
        """Have owners look rows up. Called by all ranks.

        Args:
            numbers: (ranks, n) int64 of all ranks.
            wanted: True if gradients may come.
        """
        ranks, call, by_owner = self._ranks, self._call, self._by_owner
        requests = send_ids(ranks, by_owner, numbers)
        fetched = fetch(ranks, requests, ranks.codecs[0], call.frozen, call.training)
        rows = fetched.copy_out()
        positions = by_owner.new_positions.data_ptr(), self._inverse.data_ptr()
        core = rows.batch(self._given, by_owner.counts, *positions)
        core.resolve(False, wanted, call.frozen)
        made = RowsBatch(core, call, wanted, kept=(rows, self._inverse))
        weakref.finalize(made, _give_back, by_owner.layout.fetched, rows).atexit = False
        if wanted:
            made.lookup = keep(ranks, made, requests, fetched.owned)
        return made


def _give_back(kept: list[_core.FetchedRows], rows: _core.FetchedRows) -> None:
    """Keep the memory of rows that nobody reads any more."""
    if len(kept) < _MOST_KEPT:
        kept.append(rows)


def ways_of(ranks: Ranks, call: Call, places: Sequence[ShardedPlace]) -> tuple[list[int], int]:
    """Return the ways that this rank would have, and how many numbers ranks may tell of what they ask.

    A way is, for each table of a call, how many features it has if owners pool their bags, else 0.

    Args:
        places: of the tables.
    """
    count = len(places)
    features, ids, bags = [0] * count, [0] * count, [0] * count
    weighed = set()
    for bag, t in zip(call.bags, call.table_of, strict=True):
        features[t] += 1
        ids[t] += bag.ids.shape[0]
        bags[t] += bag.bags
        if bag.weights is not None:
            weighed.add(t)
    ways, room = [0] * count, 0
    stored = ranks.codecs == (STORED, STORED)
    for t, place in enumerate(places):
        room += max(1, features[t]) * (place.owners + 1)
        least = LEAST_IDS * place.bag_parts * bags[t]
        if 0 < least <= ids[t] and t not in weighed and stored:
            ways[t] = features[t]
    return ways, room


def other_ways(opened: Handshake, begin: int, end: int) -> list[int] | None:
    """Return the ways of all ranks where these differ from those of one, by which they look up anew.

    Args:
        begin, end: of the values that are ways.

    Raises:
        PeerError: a rank has other features of a table.
    """
    told: list[list[int]] = opened.values[:, begin:end].tolist()
    for rank in range(len(told) - 1, -1, -1):
        if opened.ended[rank]:
            del told[rank]
    if told.count(told[0]) == len(told):
        return None
    agreed = []
    for of_table in zip(*told, strict=True):
        if len({way for way in of_table if way}) > 1:
            raise PeerError(
                "Ranks look up other features of a table. All must look up the same features."
            )
        agreed.append(min(of_table))
    return agreed


def _refuse_beside_dense(ranks: Ranks) -> None:
    if not ranks.inside_forward:
        raise TableError(
            "A part of a distributed model was called by itself. Gradients of its dense layers are averaged "
            "over the ranks only where the model is called: call that, or distribute the part alone."
        )


def _refuse_other_modes(opened: Handshake, mine: int, count: int) -> None:
    """Raise PeerError where ranks with batches look up in another mode than rank `mine`.

    Args:
        count: of the values that are modes.
    """
    modes: list[list[int]] = opened.values[:, :count].tolist()
    for rank, reported in enumerate(modes):
        if not opened.ended[rank] and reported != modes[mine]:
            raise PeerError(
                f"Rank {rank} looks up in another mode than rank {mine}: model.train() or eval(), "
                "requires_grad of tables, and torch.no_grad() must be alike on all ranks. All evaluate "
                "together, each its samples; hotbed.dist.even(loader) ends them together."
            )


def _bits(chosen: Sequence[int], count: int) -> list[int]:
    """Which of `count` tables are chosen."""
    words = [0] * -(-count // _BITS)
    for t in set(chosen):
        words[t // _BITS] |= 1 << t % _BITS
    return words


def serve_lookup(ranks: Ranks, opened: Handshake) -> None:
    """The part of a rank that has no batch."""
    speaks, count = opened.ended.index(False), len(opened.tables)
    words = 2 + len(_bits((), count))
    begin = words + count
    _refuse_other_modes(opened, speaks, words)  # as those with batches have
    if other_ways(opened, words, begin) is not None:
        return  # the others look up anew
    training, wanted, *bits = opened.values[speaks, :words].tolist()
    ways: list[int] = opened.values[speaks, words:begin].tolist()
    places = [ranks.table(number).place for number in opened.tables]
    frozen = {t for t in range(count) if bits[t // _BITS] >> t % _BITS & 1}
    for tables, part in parts_without_batch(ranks, places, ways):
        never = [at for at, t in enumerate(tables) if t in frozen]
        end = begin + part.width
        with torch.set_grad_enabled(bool(wanted)):
            part.serve(opened.values[:, begin:end], never, bool(training), bool(wanted))
        begin = end


def serve_rows(ranks: Ranks, opened: Handshake) -> None:
    """The same of a lookup of rows."""
    places = [ranks.table(number).place for number in opened.tables]
    fetch_by_id(ranks, send_no_ids(ranks, places, opened.values))
