"""A batch of tables that ranks share: its rows, fetched from their owners, lie beside it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.delivery import fetch_by_id
from hotbed.dist.errors import PeerError
from hotbed.dist.exchange import fetch, keep, order_by_owner, send_ids, send_no_ids
from hotbed.dist.exchanged_values import KeptLookup
from hotbed.dist.handshake import Handshake
from hotbed.dist.merging import merge
from hotbed.dist.ranks import Ranks
from hotbed.dist.shards import ShardedPlace
from hotbed.errors import OptimizerError, TableError
from hotbed.places.host.batch import HostBatch, HostPendingGradient, check, core_batch
from hotbed.table.gradients import GradientRows
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call, Lookups, StoredTable

__all__ = ["ShardedBatch", "ShardedLookups", "serve_lookup", "serve_rows"]

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

    def resolve(self, call: Call) -> ShardedBatch:
        ranks = self.ranks
        wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
        if wanted and call.training:
            _refuse_beside_dense(ranks)
        given = core_batch(call.live, call.table_of, call.bags)
        check(given, call)
        ids, inverse = (
            torch.empty(given.positions, dtype=torch.int64, device="cpu") for _ in range(2)
        )
        counts = _core.distinct_ids(given, ids.data_ptr(), inverse.data_ptr())
        by_owner = order_by_owner(
            ranks, [cast(ShardedPlace, live.place) for live in call.live], ids, counts
        )
        modes = [int(call.training), int(wanted), *_bits(call.frozen, len(call.live))]
        opened = ranks.handshake(
            "a lookup", [*modes, *by_owner.counts_to_owners], by_owner.layout.table_numbers
        )
        _refuse_other_modes(ranks, opened, modes)
        requests = send_ids(ranks, by_owner, opened.values[:, len(modes) :])
        fetched = fetch(ranks, requests, ranks.codecs[0], call.frozen, call.training)
        rows = fetched.copy_out()
        core = rows.batch(given, counts, by_owner.new_positions.data_ptr(), inverse.data_ptr())
        core.resolve(False, wanted, call.frozen)
        made = ShardedBatch(core, call, wanted, kept=(rows, inverse))
        weakref.finalize(made, _give_back, by_owner.layout.fetched, rows).atexit = False
        if wanted:
            made.lookup = keep(ranks, made, requests, fetched.owned)
            if ranks.waiting.to_be_merged:
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


class ShardedBatch(HostBatch):
    """Its rows lie beside it as long as it does.

    Attributes:
        lookup: which the ranks keep for its gradients; only where they are wanted.
    """

    lookup: KeptLookup
    has_own_rows = True

    @property
    def claim(self) -> ShardedBatch:
        """The batch itself: while it lives, ranks keep its `KeptLookup`, and owners its rows."""
        return self

    def backward(self, grads: Sequence[Tensor | None]) -> Any:
        return ShardedPendingGradient(super().backward(grads), self.lookup.first_slots)


def _give_back(kept: list[_core.FetchedRows], rows: _core.FetchedRows) -> None:
    """Keep the memory of rows that nobody reads any more."""
    if len(kept) < _MOST_KEPT:
        kept.append(rows)


def _refuse_beside_dense(ranks: Ranks) -> None:
    if not ranks.inside_forward:
        raise TableError(
            "A part of a distributed model was called by itself. Gradients of its dense layers are averaged "
            "over the ranks only where the model is called: call that, or distribute the part alone."
        )


def _refuse_other_modes(ranks: Ranks, opened: Handshake, modes: list[int]) -> None:
    for rank, reported in enumerate(opened.values[:, : len(modes)].tolist()):
        if not opened.ended[rank] and reported != modes:
            raise PeerError(
                f"Rank {rank} looks up in another mode than rank {ranks.rank}: model.train() or eval(), "
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
    speaks = opened.ended.index(False)
    modes = 2 + len(_bits((), len(opened.tables)))
    training, wanted, *bits = opened.values[speaks, :modes].tolist()
    frozen = [t for t in range(len(opened.tables)) if bits[t // _BITS] >> t % _BITS & 1]
    requests = send_no_ids(ranks, opened, opened.values[:, modes:])
    with torch.set_grad_enabled(bool(wanted)):
        fetched = fetch(ranks, requests, ranks.codecs[0], frozen, bool(training))
    if wanted:
        keep(ranks, None, requests, fetched.owned)


def serve_rows(ranks: Ranks, opened: Handshake) -> None:
    """The same of a lookup of rows."""
    fetch_by_id(ranks, send_no_ids(ranks, opened, opened.values))


class ShardedPendingGradient:
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

    def step(self, updates: object) -> NoReturn:
        raise OptimizerError("fused=True updates tables in backward, which ranks cannot agree on.")
