"""A batch of tables that ranks share: its rows, fetched from their keepers, lie beside it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed import _core, init
from hotbed.dist.merging import merge
from hotbed.dist.opening import Opened
from hotbed.dist.peers import PeerError
from hotbed.dist.ranks import Ranks
from hotbed.dist.trip import Trip
from hotbed.errors import OptimizerError, TableError
from hotbed.places.host.batch import HostBatch, HostLeft, check, core_batch
from hotbed.table.gradients import LeftRows
from hotbed.table.lookups import Call
from hotbed.tables import CORE_DTYPES

__all__ = ["ShardedBatch", "serve_lookup", "serve_rows"]

_BITS = 62
"""Of tables in a number."""
_MOST_KEPT = 2
"""Tables of batches that are gone, kept for those to come."""


_NO_IDS = torch.empty(0, dtype=torch.int64)


class _Scratch:
    """The rows of one batch, as the core's batch takes a table."""

    def __init__(self, live: Any, ids: Tensor, rows: Sequence[Tensor], slots: Tensor) -> None:
        """`rows`: (any, dim) pieces, in the order of the ids. `slots`: (any,) int64 from 0 on."""
        spec = live.spec
        self.combiner = live.combiner
        padding = None
        if spec.padding_idx is not None:
            at = torch.nonzero(ids == spec.padding_idx).flatten()
            padding = int(at[0]) if len(at) else None
        # One that an earlier batch had is used again: fresh memory costs more than the rows.
        self._kept = live.place.scratch if padding is None else []
        size = ids.shape[0]
        fits = [n for n, c in enumerate(self._kept) if size <= c.size <= 8 * size + 64]
        self.core = self._kept.pop(fits[0]) if fits else self._made(spec, size, padding)
        first = slots.data_ptr()
        for some in rows:
            count = some.shape[0]
            _core.write(self.core, first, count, some.data_ptr())
            first += 8 * count

    @staticmethod
    def _made(spec: Any, rows: int, padding: int | None) -> Any:
        zeros = init.Zeros().resolve(None, 1)
        dtype = CORE_DTYPES[spec.dtype]
        size = max(1, rows) if padding is not None else 1 << max(1, rows).bit_length()
        return _core.Table.make(spec.name, size, spec.dim, dtype, *zeros, 0, padding)

    def give_back(self) -> None:
        """Nobody reads the rows any more."""
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(self.core)


class ShardedBatch(HostBatch):
    """Its rows lie beside it as long as it does."""

    trip: Trip

    @classmethod
    def of(cls, ranks: Ranks, call: Call) -> ShardedBatch:
        wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
        if wanted and call.training:
            _refuse_beside_dense(ranks)
        check(core_batch(call.live, call.table_of, call.bags), call)
        distinct, positions = _grouped(call)
        trip = Trip(ranks, [live.place for live in call.live], distinct)
        modes = [int(call.training), int(wanted), *_bits(call.frozen, len(call.live))]
        numbers = [place.number for place in trip.places]
        opened = ranks.agree("a lookup", [*modes, *trip.numbers], numbers)
        _refuse_other_modes(ranks, opened, modes)
        rows = trip.fetch(opened.numbers[:, len(modes) :], call.frozen, call.training)
        bags = [
            bag._replace(ids=trip.renumbered(t, own))
            for bag, t, own in zip(call.bags, call.table_of, positions, strict=True)
        ]
        slots = torch.arange(max(own.shape[0] for own in trip.asked))
        scratch = [
            _Scratch(live, own, some, slots)
            for live, own, some in zip(call.live, trip.asked, rows, strict=True)
        ]
        core = core_batch(scratch, call.table_of, bags)
        core.resolve(False, wanted, call.frozen)
        made = cls(core, call._replace(bags=bags), wanted, kept=(scratch, bags))
        made.trip = trip
        weakref.finalize(made, _give_back, scratch).atexit = False
        if wanted:
            trip.wait(made)
            if ranks.waiting.to_be_merged:
                merge(ranks)
        return made

    def backward(self, grads: Sequence[Tensor | None]) -> Any:
        return ShardedLeft(super().backward(grads), self)


def _give_back(scratch: list[_Scratch]) -> None:
    for one in scratch:
        one.give_back()


def _grouped(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """(n,) distinct ids of each table, as they first appear; and for each feature the positions of its ids
    among them."""
    of_table: list[list[int]] = [[] for _ in call.live]
    for f, t in enumerate(call.table_of):
        of_table[t].append(f)
    given = [bag.ids for bag in call.bags]
    counts: list[int] = []  # of distinct ids of each table
    order = [f for features in of_table for f in features]
    sizes = [given[f].shape[0] for f in order]
    distinct, inverse = (torch.empty(sum(sizes), dtype=torch.int64) for _ in range(2))
    to, back = distinct.data_ptr(), inverse.data_ptr()
    for features in of_table:
        if len(features) == 1:
            ids = given[features[0]].long().contiguous()
        else:
            ids = torch.cat([_NO_IDS, *(given[f].long() for f in features)])
        size = ids.shape[0]
        counts.append(_core.group_ids(ids.data_ptr(), size, to, back))
        to, back = to + 8 * counts[-1], back + 8 * size
    asked = list(distinct[: sum(counts)].split(counts))  # type: ignore[no-untyped-call]
    numbered = dict(zip(order, inverse.split(sizes), strict=True))  # type: ignore[no-untyped-call]
    return asked, [numbered[f] for f in range(len(given))]


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
    trip = Trip(ranks, places, [torch.empty(0, dtype=torch.int64) for _ in places])
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
        trip = Trip(ranks, [place], [torch.empty(0, dtype=torch.int64)])
        trip.fetch(opened.numbers, [], False)


class ShardedLeft:
    """What one backward left: by the batch's own numbers, which its places make slots of."""

    def __init__(self, left: HostLeft, batch: ShardedBatch) -> None:
        self._left, self._batch = left, batch
        self.places = left.places

    def shares(self, tables: Sequence[int]) -> list[LeftRows]:
        first = self._batch.trip.first_slots
        return [
            LeftRows(
                share.slots + first[t] if first[t] else share.slots,
                share.rows,
                True,
                share.finite,
                self._batch,
            )
            for t, share in zip(tables, self._left.shares(tables), strict=True)
        ]

    def step(self, updates: Any) -> None:
        raise OptimizerError("fused=True updates tables in backward, which ranks cannot agree on.")
