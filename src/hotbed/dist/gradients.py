"""Gradients of tables that ranks share: what waits on each rank, and how it comes to the owners."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hotbed.dist.declarations import Declaration
from hotbed.dist.errors import PeerError, is_known_to_all
from hotbed.dist.exchange import Given
from hotbed.dist.exchanged_values import KeptLookup
from hotbed.dist.handshake import Handshake
from hotbed.dist.merging import merge, serve_merge
from hotbed.dist.ranks import Ranks
from hotbed.dist.shards import TableOnRanks
from hotbed.dist.waiting import AtOwners
from hotbed.dist.waiting_gradients import WaitingOnRanks, waiting_of
from hotbed.errors import TableError
from hotbed.places.host.step import rows_of
from hotbed.table.gradients import GradientRows
from hotbed.table.handles import OpenHandle, instances, touches_rows
from hotbed.table.live import LiveTable
from hotbed.table.sparse_gradient import Function, Keywords, TableGradient, stored_gradient

__all__ = [
    "Collected",
    "SharedHandle",
    "collect",
    "serve_collect",
]


class Collected:
    """Result of bringing gradients to the owners.

    Attributes:
        tables: those of which any rank has a gradient.
        fault: why this rank could not take some.
    """

    def __init__(self, tables: list[TableOnRanks], kept: Collection[TableOnRanks]) -> None:
        """`kept`: tables of which the owners have gradients already."""
        self.tables, self._kept = tables, kept
        self.fault: Exception | None = None
        self._arrived: dict[LiveTable, list[GradientRows]] = {}

    def add(self, arrived: Iterable[tuple[LiveTable, GradientRows]]) -> None:
        """Take gradients of shards in."""
        for part, rows in arrived:
            self._arrived.setdefault(part, []).append(rows)

    def keep(self) -> None:
        """Leave the gradients at their owners."""
        for part, arrived in self._arrived.items():
            part.waiting.shares += arrived

    def rows_of(self, live: TableOnRanks, part: LiveTable) -> GradientRows | None:
        """The gradient of a shard of a table, with what its owner has of it; None: there is none."""
        arrived = self._arrived.get(part, ())
        if len(arrived) <= 1 and live not in self._kept:
            return arrived[0] if arrived else None
        handle = part.parameter
        before = stored_gradient(handle)
        handle.waiting.shares += arrived
        try:
            return rows_of(part)
        finally:
            handle.waiting.replace(handle, before)


def collect(
    ranks: Ranks,
    kind: str,
    tables: Sequence[TableOnRanks],
    values: Sequence[int] = (),
    declared: Declaration | None = None,
) -> tuple[Handshake, Collected]:
    """Brings gradients to the owners. Called by all ranks, with the same tables.

    Args:
        values: what else goes along with the opening message.
        declared: what must be alike on all ranks.
    """
    places = [live.place.number for live in tables]
    while True:
        lookups = ranks.waiting.lookups
        own = _by_lookup(tables, lookups)
        flags: list[int] = []
        for lookup, of_tables in zip(lookups, own, strict=True):
            taken = lookup.kind_given
            flags += [
                0 if one is None else 1 if type(one) is taken else _NOT_TAKEN for one in of_tables
            ]
        opened = ranks.handshake(kind, [*values, *flags], places, declared=declared)
        of_ranks = opened.values[:, len(values) :]
        if not bool((of_ranks == _NOT_TAKEN).any()):
            break
        merge(ranks)
    return opened, _brought(ranks, opened, tables, own, of_ranks)


def serve_collect(ranks: Ranks, opened: Handshake, width: int) -> Collected:
    """The part of a rank that has no batch. `width`: of the values that go along."""
    while bool((opened.values[:, width:] == _NOT_TAKEN).any()):
        serve_merge(ranks, ranks.serve())
        opened = ranks.serve()
    tables = [ranks.table(number) for number in opened.tables]
    nothing: list[list[object]] = [[None] * len(tables) for _ in opened.waiting]
    return _brought(ranks, opened, tables, nothing, opened.values[:, width:])


_EMPTIED = object()
"""Gradient of a lookup with ids, which zero_grad(set_to_none=False) has left without a row: zeros for its ids
would have rules with momentum move these. No `KeptLookup` takes it, and a merge asks for none of them."""
_NOT_TAKEN = 2
"""What is told of a gradient that `KeptLookup.give` would not take, so that all are merged; 1 of others, and
0 that there is none."""


def _by_lookup(tables: Sequence[TableOnRanks], lookups: Sequence[KeptLookup]) -> list[list[object]]:
    """Return, for each lookup, the gradient of each table; None where there is none."""
    found: list[list[object]] = [[None] * len(tables) for _ in lookups]
    at_of = {id(lookup): at for at, lookup in enumerate(lookups)}
    for t, live in enumerate(tables):
        waiting = waiting_of(live)
        shares = waiting.shares
        if len(shares) == 1 and not waiting.sources and stored_gradient(live.parameter) is None:
            share = shares[0]
            if isinstance(share, GradientRows) and share.distinct:
                lookup: KeptLookup | None = getattr(share.claim, "lookup", None)
                at = at_of.get(id(lookup))
                if lookup is not None and at is not None:  # as one backward has left it
                    first = lookup.first_slots[lookup.layout.position[live.place.number]]
                    found[at][t] = Given((*share.in_core, first), share)
                    continue
        for at, one in _divided(live, waiting, lookups):
            found[at][t] = one
    return found


def _divided(
    live: TableOnRanks, waiting: WaitingOnRanks, lookups: Sequence[KeptLookup]
) -> Iterator[tuple[int, object]]:
    """Yield what is left for a table, by positions of the lookups that it is of."""
    handle, number = live.parameter, live.place.number
    if by_bags := waiting.by_bags(handle):
        of_lookups = {id(share.batch.lookup): share for share in by_bags}
        for at, lookup in enumerate(lookups):
            yield at, of_lookups.get(id(lookup))
        return
    left = [getattr(o, "lookup", None) for o in waiting.sources_of(handle)]
    rows = waiting.in_rows(live)
    if rows is None:
        return
    for at, lookup in enumerate(lookups):
        t = lookup.layout.position.get(number, -1)
        if t < 0:
            continue
        first, count = lookup.first_slots[t], lookup.counts[t]
        own = rows.slots - first
        inside = (own >= 0) & (own < count)
        if rows.distinct and own.shape[0] == count and bool(inside.all()):
            yield at, Given((*rows.in_core, first), rows)
            continue
        here = torch.nonzero(inside).flatten()
        if not here.shape[0] and not any(one is lookup for one in left):
            continue
        if count and not rows.slots.shape[0]:
            yield at, _EMPTIED
            continue
        grad = torch.zeros((count, live.spec.dim), dtype=live.spec.compute_dtype, device="cpu")
        grad.index_add_(0, own[here], rows.rows[here])
        yield at, Given.of(grad)


def _brought(
    ranks: Ranks,
    opened: Handshake,
    tables: Sequence[TableOnRanks],
    own: list[list[object]],
    flags: Tensor,
) -> Collected:
    by_lookup = flags.any(0).view(len(opened.waiting), len(tables))
    kept = [live for live in tables if live.place.number in opened.clipped]
    of_tables: list[bool] = by_lookup.any(0).tolist()
    stepped = [live for live, some in zip(tables, of_tables, strict=True) if some or live in kept]
    found = Collected(stepped, kept)
    found.fault = _fault_of_kept(opened, kept)
    numbers = [live.place.number for live in tables]
    steps: dict[int, int] = {}
    every: list[list[bool]] = by_lookup.tolist()
    for lookup, any_rank, of_own in zip(opened.waiting, every, own, strict=True):
        position = lookup.layout.position
        if lookup.needs_seeds and not steps:  # else nothing is rounded
            rules = [(live.place.number, live.rule) for live in tables]
            steps = {number: 0 if rule is None else rule.steps for number, rule in rules}
        seeds = [steps.get(number, 0) for number in position]
        given: list[object] = [None] * len(position)
        chosen = [False] * len(position)
        for number, some, one in zip(numbers, any_rank, of_own, strict=True):
            if some:
                t = position[number]
                chosen[t], given[t] = True, one
        if not any(chosen):
            continue
        ranks.waiting.tell_of(lookup)
        try:
            found.add(lookup.give(ranks, given, chosen, seeds))
        except Exception as error:
            if is_known_to_all(error):
                raise  # on all ranks
            found.fault = error  # of this rank alone: the others go on to the vote
    return found


def _fault_of_kept(opened: Handshake, kept: Sequence[TableOnRanks]) -> PeerError | None:
    """Return the error where one rank has given up a clipped gradient that another has not."""
    with_batch = [rank for rank, ended in enumerate(opened.ended) if not ended]
    for live in kept:
        of_ranks = [state == AtOwners.ROWS for state in opened.clipped[live.place.number]]
        if len(set(of_ranks)) > 1:
            gave_up, has = (with_batch[of_ranks.index(one)] for one in (False, True))
            return PeerError(
                f"Rank {gave_up} has given up the clipped gradient of table {live.name!r}, and rank {has} "
                "has not. Call zero_grad() on all ranks, or on none, between clipping and a step."
            )
    return None


class _OfThisRank(TableGradient):
    """Gradients of this rank's batches alone, by which torch must not clip.

    Attributes:
        handle: of the table, as long as this is its gradient.
    """

    handle: weakref.ref[SharedHandle]

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        if func in _NOT_OF_A_PART:
            raise TableError(
                f"{func.__name__} of this rank's part of a gradient says nothing of the whole, and each rank "
                "would clip by another number. Clip with hotbed.nn.clip_grad_norm_ or clip_grad_value_."
            )
        grad = next(instances(tuple(args), _OfThisRank), None)
        handle = grad.handle() if grad is not None and hasattr(grad, "handle") else None
        if handle is not None and handle.waiting.at_owners:
            if func is Tensor.zero_:
                handle.waiting.zero(handle)
                return grad
            cls.refuse_at_owners(func, handle)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def refuse_at_owners(cls, func: Function, handle: SharedHandle) -> None:
        """Raise TableError for functions that would miss what clipping has brought to the owners."""
        if func.__name__.endswith("_") and touches_rows(func):
            raise _at_owners(func, handle)


class _AtOwners(_OfThisRank):
    """Stands for a gradient that clipping has brought to its owners. It has no rows here."""

    @classmethod
    def of(cls, handle: SharedHandle) -> Tensor:
        table = handle.hotbed_table
        slots = torch.empty(0, dtype=torch.int64, device="cpu")
        rows = torch.empty((0, table.spec.dim), dtype=table.compute_dtype, device="cpu")
        made = cls.over(slots, rows, handle.shape, ())
        assert isinstance(made, cls)
        made.handle = weakref.ref(handle)
        return made

    @classmethod
    def refuse_at_owners(cls, func: Function, handle: SharedHandle) -> None:
        if touches_rows(func) and func.__name__ not in _PARTS_OF_SPARSE:
            raise _at_owners(func, handle)


class _Elsewhere(_AtOwners):
    """Stands for a gradient of bags whose ids lie on other ranks."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        grad = next(instances(tuple(args), _Elsewhere), None)
        handle = grad.handle() if grad is not None else None
        if handle is not None and func is Tensor.zero_:
            handle.waiting.zero(handle)
            return grad
        if handle is not None and touches_rows(func) and func.__name__ not in _SHAPES:
            raise TableError(
                f"{func.__name__} of the gradient of table {handle.hotbed_table.name!r}: its batches are of "
                "hotbed.dist.owned, and its rows on the ranks that keep them. A GradScaler, and whatever "
                "reads or changes gradients but hotbed.nn.clip_grad_norm_, needs hotbed.dist.slices."
            )
        return super().__torch_function__(func, types, args, kwargs)


def _at_owners(func: Function, handle: SharedHandle) -> TableError:
    return TableError(
        f"{func.__name__} of the gradient of table {handle.hotbed_table.name!r}: clipping has brought it to "
        "the ranks that own its rows, where it waits for step() or zero_grad(). Read or change gradients "
        "before they are clipped."
    )


_SHAPES = {"sparse_dim", "dense_dim"}
_PARTS_OF_SPARSE = {"_values", "_indices", "_nnz", "sparse_dim", "dense_dim"}
"""Functions of a sparse tensor that may show that there are no rows; a GradScaler asks for the first."""
_NOT_OF_A_PART = {
    *(torch.linalg.vector_norm, torch.norm, Tensor.norm, torch.linalg.norm),
    *(torch.clamp, Tensor.clamp, Tensor.clamp_, Tensor.clip, Tensor.clip_),
}


class SharedHandle(OpenHandle):
    """The handle of a table that ranks share. Its gradient is what this rank's batches left."""

    waiting: WaitingOnRanks

    @property
    def grad(self) -> Tensor | None:
        """Gradient of this rank's batches; without rows once clipping has brought it to the owners."""
        if self.waiting.shares and self.waiting.lies_elsewhere:
            return _Elsewhere.of(self)
        found = self.waiting.look(self)
        if found is None and self.waiting.at_owners:
            return _AtOwners.of(self)
        if type(found) is TableGradient:
            found.__class__ = _OfThisRank
            assert isinstance(found, _OfThisRank)
            found.handle = weakref.ref(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if not isinstance(value, _AtOwners):  # which stands for what there is
            self.waiting.replace(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.waiting.drop(self)
