"""A batch of tables that ranks share: rows come here, or vectors of bags that the owners have pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hotbed.dist.delivery import fetch_by_id
from hotbed.dist.errors import PeerError
from hotbed.dist.exchange import send_no_ids
from hotbed.dist.handshake import Handshake
from hotbed.dist.hosts_ahead import PrefetchOnHost
from hotbed.dist.merging import merge
from hotbed.dist.parts import Asked
from hotbed.dist.prefetch import BatchOnRanks, PrefetchOnRanks
from hotbed.dist.ranks import Ranks
from hotbed.dist.roles import refuse_memory_host
from hotbed.dist.rows_ahead import Travelled
from hotbed.dist.served import ServedLookup
from hotbed.dist.shards import TableOnRanks
from hotbed.dist.ways import (
    AHEAD,
    WHOLE,
    RowsTold,
    agree,
    bits,
    refuse_other_modes,
    room_of,
    round_of_all,
)
from hotbed.dist.whole_ahead import WholeAhead
from hotbed.dist.whole_batches import WholeBags, look_up_whole
from hotbed.errors import TableError
from hotbed.places.host.batch import check, core_batch
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call, CallAhead, Lookups, StoredTable
from hotbed.table.prefetch import BatchAhead
from hotbed.table.resolved import Resolved

__all__ = ["ShardedLookups", "serve_lookup", "serve_rows"]

_MODES = 2
"""Of a lookup, before its frozen tables: whether new ids get rows, and whether gradients may come."""


class ShardedLookups(Lookups):
    """Tables that the same ranks share."""

    ranks: Ranks
    is_immediate = True  # those of the shards see to it

    def __init__(self, ranks: Ranks, prefetcher: PrefetchOnRanks | None = None) -> None:
        """`prefetcher`: None: no shard lies in tiers."""
        self.ranks = ranks
        self._prefetcher = prefetcher

    @property
    def prefetcher(self) -> PrefetchOnRanks | None:
        return self._prefetcher

    @property
    def where(self) -> str:
        return f"shards of {self.ranks.size} ranks"

    def allocate(self, live: Sequence[StoredTable]) -> None:
        for own in _own(live):
            own.allocate()

    def prepare(self, call: CallAhead) -> BatchAhead:
        if self._prefetcher is None:
            return super().prepare(call)
        bags = call.read(call.inputs)
        if WholeBags in map(type, bags):
            return WholeAhead(self.ranks, call, bags)
        return BatchOnRanks(self._prefetcher, call, bags)

    def resolve(self, call: Call) -> Resolved:
        ranks = self.ranks
        if ranks.rank in ranks.hosts:
            with ranks.reporting("a lookup"):
                refuse_memory_host("A forward")
        wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
        if wanted and call.training:
            _refuse_beside_dense(ranks)
        modes = [int(call.training), int(wanted), *bits(call.frozen, len(call.live))]
        places = [live.place for live in cast(Sequence[TableOnRanks], call.live)]
        tables = [place.number for place in places]

        def tell(numbers: list[int]) -> tuple[Tensor, list[bool]]:
            opened = ranks.handshake("a lookup", numbers, tables)
            return opened.values, opened.ended

        if WholeBags in map(type, call.bags):
            return look_up_whole(ranks, call, wanted, modes, tell)
        given = core_batch(call.live, call.table_of, call.bags)
        ahead = None if self._prefetcher is None else self._prefetcher.pop(call, given)
        if ahead is None:
            check(given, call)
        asked: Asked | None = None
        if ahead is not None:
            told = [*ahead.numbers(), *modes, *[0] * room_of(call, places)]
            opened = ranks.handshake("a lookup", told, tables)
            refuse_other_modes(opened.values, opened.ended, ranks.rank, len(modes))
            if round_of_all(opened.values, ranks.hosts) == ahead.round:
                asked = ahead.asked
                asked.use(call, given)
                ahead.hear(RowsTold.of(opened, ranks.hosts))
        if asked is None:
            asked, numbers = agree(ranks, call, given, places, modes, tell)
            asked.send(ranks, numbers)
        before = len(ranks.waiting.lookups)
        made = asked.fetch(wanted)
        if ahead is not None and asked is ahead.asked and wanted:
            ahead.send_rows_of_next(ranks.waiting.lookups[before:])
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


def _refuse_beside_dense(ranks: Ranks) -> None:
    if not ranks.inside_forward:
        raise TableError(
            "A part of a distributed model was called by itself. Gradients of its dense layers are averaged "
            "over the ranks only where the model is called: call that, or distribute the part alone."
        )


def serve_lookup(ranks: Ranks, opened: Handshake, ahead: PrefetchOnHost | None = None) -> None:
    """The part of a rank that has no batch.

    Args:
        ahead: knows what the others have asked for in rounds; None: this rank takes part in none.
    """
    speaks, values = opened.ended.index(False), opened.values
    modes = _MODES + len(bits((), len(opened.tables)))
    refuse_other_modes(values, opened.ended, speaks, modes)  # as those with batches have
    if int(values[speaks, 0]) == WHOLE:
        raise PeerError(
            "The others look up batches of hotbed.dist.owned, and this rank has none any more."
        )
    served: ServedLookup | None = None
    following: Travelled | None = None
    if not bool(values[:, 0].any()):
        served = ServedLookup.of(ranks, opened.tables, values, opened.ended, _MODES)
        if served is not None:
            served.send(ranks)
    elif ahead is not None and (number := round_of_all(values, ranks.hosts)):
        served, following = ahead.take(number, RowsTold.of(opened, ranks.hosts))
    if served is not None:  # else the others look up anew
        before = len(ranks.waiting.lookups)
        training, wanted = map(bool, values[speaks, AHEAD : AHEAD + _MODES].tolist())
        served.fetch(training, wanted)
        if ahead is not None and following is not None and wanted:
            ahead.send_ahead(following, ranks.waiting.lookups[before:])


def serve_rows(ranks: Ranks, opened: Handshake) -> None:
    """The same of a lookup of rows."""
    places = [ranks.table(number).place for number in opened.tables]
    fetch_by_id(ranks, send_no_ids(ranks, places, opened.values))
