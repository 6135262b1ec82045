"""A batch of tables that ranks share: its rows, fetched from their owners, lie beside it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.errors import PeerError
from hotbed.dist.exchange import Exchange
from hotbed.dist.handshake import Opened
from hotbed.dist.merging import merge
from hotbed.dist.ranks import Ranks
from hotbed.errors import OptimizerError, TableError
from hotbed.places.host.batch import HostBatch, HostPendingGradient, check, core_batch
from hotbed.table.gradients import GradientRows
from hotbed.table.lookups import Call

__all__ = ["ShardedBatch", "serve_lookup", "serve_rows"]

_BITS = 62
"""Of tables in a number."""
_MOST_KEPT = 2
"""Rows of batches that are gone, kept for those to come."""


class ShardedBatch(HostBatch):
    """Its rows lie beside it as long as it does."""

    trip: Exchange

    @classmethod
    def of(cls, ranks: Ranks, call: Call) -> ShardedBatch:
        wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
        if wanted and call.training:
            _refuse_beside_dense(ranks)
        given = core_batch(call.live, call.table_of, call.bags)
        check(given, call)
        trip, inverse = Exchange.of_batch(ranks, [live.place for live in call.live], given)
        modes = [int(call.training), int(wanted), *_bits(call.frozen, len(call.live))]
        opened = ranks.agree("a lookup", [*modes, *trip.numbers], trip.layout.numbers)
        _refuse_other_modes(ranks, opened, modes)
        messages = trip.fetch(opened.numbers[:, len(modes) :], call.frozen, call.training)
        rows = trip.fetched(messages)
        core = rows.batch(given, trip.counts, trip.moved.data_ptr(), inverse.data_ptr())
        core.resolve(False, wanted, call.frozen)
        made = cls(core, call, wanted, kept=(rows, inverse))
        made.trip = trip
        weakref.finalize(made, _give_back, trip.layout.fetched, rows).atexit = False
        if wanted:
            trip.wait(made)
            if ranks.waiting.to_be_merged:
                merge(ranks)
        return made

    @property
    def claim(self) -> ShardedBatch:
        return self

    def backward(self, grads: Sequence[Tensor | None]) -> Any:
        return ShardedPendingGradient(super().backward(grads), self.trip.first_slots)


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


def _refuse_other_modes(ranks: Ranks, opened: Opened, modes: list[int]) -> None:
    for rank, told in enumerate(opened.numbers[:, : len(modes)].tolist()):
        if not opened.ended[rank] and told != modes:
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


def serve_lookup(ranks: Ranks, opened: Opened) -> None:
    """The part of a rank that has no batch."""
    speaks = opened.ended.index(False)
    modes = 2 + len(_bits((), len(opened.tables)))
    training, wanted, *bits = opened.numbers[speaks, :modes].tolist()
    places = [ranks.table(number).place for number in opened.tables]
    trip = Exchange(ranks, places, [torch.empty(0, dtype=torch.int64) for _ in places])
    frozen = [t for t in range(len(places)) if bits[t // _BITS] >> t % _BITS & 1]
    with torch.set_grad_enabled(bool(wanted)):
        trip.fetch(opened.numbers[:, modes:], frozen, bool(training))
    if wanted:
        trip.wait(None)


def serve_rows(ranks: Ranks, opened: Opened) -> None:
    """The same of a lookup of rows."""
    (number,) = opened.tables
    place = ranks.table(number).place
    with torch.no_grad():
        trip = Exchange(ranks, [place], [torch.empty(0, dtype=torch.int64)])
        trip.fetch(opened.numbers, [], False)


class ShardedPendingGradient:
    """Gradients of one backward: by the batch's own numbers, which its places make slots of."""

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

    def step(self, updates: Any) -> None:
        raise OptimizerError("fused=True updates tables in backward, which ranks cannot agree on.")
