"""Rows of the next batch, which travel while the present one is trained on.

When ranks look the present batch up, owners know already what they are asked for the next one. Rows that the
present batch does not ask for stay as they are until its step is over: these are sent at once, on a group
beside, and the others with the next lookup.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hotbed import _core, trace
from hotbed.dist.beside import Beside
from hotbed.dist.delivery import owned_ids
from hotbed.dist.exchange import Fetched, KeptRows, fetch, ids_here, live_shards, look_up_owned
from hotbed.dist.exchanged_values import (
    Gathering,
    IdsByOwner,
    KeptLookup,
    OwnedInputs,
    OwnedRows,
    Requests,
)
from hotbed.dist.layout import Layout
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import exchange
from hotbed.dist.sending import RowsComing, addresses, among, begin_rows, send_rows
from hotbed.table.live import LiveTable

__all__ = ["Divides", "FetchedInParts", "RowsAhead", "SentInParts", "Travelled", "divided"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Some of the ids of a batch."""

    requests: Requests
    positions: Tensor
    """(n,) int64: of its ids among all ids of their tables."""


class _Parts(NamedTuple):
    """The ids of a batch in two parts."""

    fresh: _Part
    """Those that the batch before does not ask for, on any rank."""
    again: _Part


def divided(
    messenger: Gathering, before: Requests, now: Requests, tables: Sequence[int]
) -> SentInParts:
    """Divide the ids that all ranks ask for by whether any rank asks for them in the batch before, too.
    Called by all ranks.

    Args:
        before: with the same layout.
        tables: numbers of the tables.
    """
    again_here = _again_here(before, now)
    again = _told_by_owners(messenger, now, again_here)
    parts = _Parts(_part(now, ~again, ~again_here), _part(now, again, again_here))
    return SentInParts(now, parts, tables)


def _part(now: Requests, mask: Tensor, here: Tensor) -> _Part:
    """Return some of the ids.

    Args:
        mask: (n,) bool, which of those that this rank asks for.
        here: (n,) bool, which of those asked of its shards.
    """
    by_owner, positions = _some_of(now.by_owner, mask)
    counts = _counts_in(here, now.core.asked_here())
    core = _core.Exchange(by_owner.layout.core, by_owner.counts_to_owners, counts)
    return _Part(Requests(by_owner, core, now.ids_here[here]), positions)


def _again_here(before: Requests, now: Requests) -> Tensor:
    """(n,) bool: which of the ids asked of the shards of this rank were asked of them before."""
    found = [torch.empty(0, dtype=torch.bool, device="cpu")]
    for (_, earlier, _), (_, ids, _) in zip(owned_ids(before), owned_ids(now), strict=True):
        both = torch.cat([earlier, ids])
        distinct, inverse = torch.empty_like(both), torch.empty_like(both)
        count = _core.group_ids(both.data_ptr(), len(both), distinct.data_ptr(), inverse.data_ptr())
        asked = torch.zeros(count, dtype=torch.bool, device="cpu")
        asked[inverse[: len(earlier)]] = True
        found.append(asked[inverse[len(earlier) :]])
    return torch.cat(found)


def _told_by_owners(messenger: Gathering, now: Requests, again_here: Tensor) -> Tensor:
    """(n,) bool: the same of the ids that this rank asks for, as their owners tell it."""
    layout, core, size = now.by_owner.layout, now.core, now.by_owner.layout.size
    pieces = again_here.view(torch.uint8).split_with_sizes(core.asked_here())
    kept_by = layout.core.kept_by
    coming = [sum(core.count(layout.rank, s) for s in kept) for kept in kept_by]
    received = exchange(
        among(layout, messenger),
        "ids that come again",
        [pieces[rank::size] for rank in range(size)],
        coming,
    )
    again = torch.empty(len(now.by_owner.ids), dtype=torch.uint8, device="cpu")
    of_tables = again.split_with_sizes(now.by_owner.counts)
    for kept, message in zip(kept_by, received, strict=True):
        begin = 0
        for s in kept:
            first, count = core.begin(layout.rank, s), core.count(layout.rank, s)
            of_tables[layout.shards[s][0]][first : first + count] = message[begin : begin + count]
            begin += count
    return again.view(torch.bool)


def _counts_in(mask: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return how many are True of the first so many of a mask, then of the next."""
    if not sizes:
        return []
    sums = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), mask.cumsum(0)])
    ends = torch.tensor(sizes, device="cpu").cumsum(0)
    found: list[int] = sums[ends].diff(prepend=sums[:1]).tolist()
    return found


def _some_of(by_owner: IdsByOwner, mask: Tensor) -> tuple[IdsByOwner, Tensor]:
    """Return some of the ids, and (n,) int64 their positions among all ids of their tables."""
    of_tables = [part.nonzero().flatten() for part in mask.split_with_sizes(by_owner.counts)]
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    counts, positions = [len(some) for some in of_tables], torch.cat([none, *of_tables])
    numbers = _counts_in(mask, by_owner.counts_to_owners)
    return IdsByOwner(by_owner.layout, by_owner.ids[mask], counts, none, numbers), positions


class SentInParts:
    """`hotbed.dist.rows_batch.Sent`, whose rows may come in two parts.

    Attributes:
        tables: their numbers.
    """

    def __init__(self, requests: Requests, parts: _Parts, tables: Sequence[int]) -> None:
        self.requests = self.at_owners = requests
        self.tables = tables
        self._parts = parts
        self._coming: RowsComing | None = None

    @property
    def layout(self) -> Layout:
        return self.requests.by_owner.layout

    def owned(self, frozen: Sequence[int]) -> OwnedInputs:
        return OwnedInputs(self.layout, ids_here(self.requests), frozen)

    def in_parts(
        self, messenger: Gathering, before: Requests, tables: Sequence[int]
    ) -> tuple[SentInParts, SentInParts]:
        made = divided(messenger, before, self.requests, tables)
        return made, made

    def begin(self, beside: Beside) -> None:
        """Have owners send the rows that the batch before does not ask for. Called by all ranks.

        Raises:
            Exception: of this rank alone; the rows that come are to be dropped.
        """
        fresh = self._parts.fresh.requests

        def look_up(buffers: list[Tensor]) -> None:
            look_up_owned(fresh, (), False, buffers)

        core = fresh.core
        with torch.no_grad():
            self._coming = begin_rows(beside, self.layout, core.count, core.row_sizes(), look_up)

    def drop(self) -> None:
        """Have all rows come with the lookup."""
        self._coming = None

    def fetch(
        self, ranks: Ranks, frozen: Sequence[int], training: bool, wanted: bool
    ) -> Fetched | FetchedInParts:
        coming, self._coming = self._coming, None
        if coming is None:
            return fetch(ranks, self.requests, frozen, training)
        with ranks.listening(), trace.span("wait for rows ahead"):
            messages = coming.wait()
        ranks.served += len(self.requests.ids_here)
        owned: OwnedRows | None = None
        first: list[Tensor] = []
        again = self._parts.again.requests

        def look_up(buffers: list[Tensor]) -> None:
            nonlocal owned, first
            owned = look_up_owned(self.requests, frozen, training)
            first = coming.decode(messages)
            with torch.no_grad():
                look_up_owned(again, frozen, False, buffers)

        core = again.core
        rest = send_rows(ranks, "rows", self.layout, core.count, core.row_sizes(), look_up)
        return FetchedInParts(self.requests, owned, self._parts, (first, rest))


class FetchedInParts(NamedTuple):
    """`hotbed.dist.exchanged_values.Answer`."""

    requests: Requests
    owned: OwnedRows | None
    parts: _Parts
    messages: tuple[list[Tensor], list[Tensor]]
    """Of each part, as the core reads them."""

    def copy_out(self) -> _core.FetchedRows:
        by_owner = self.requests.by_owner
        kept = by_owner.layout.fetched
        found = kept.pop() if kept else _core.FetchedRows(by_owner.layout.core)
        parts = [
            (part.requests.core, part.positions.data_ptr(), addresses(messages))
            for part, messages in zip(self.parts, self.messages, strict=True)
        ]
        found.read_parts(self.requests.core, by_owner.ids.data_ptr(), parts)
        return found

    def kept(self, first_slots: list[int]) -> KeptRows:
        return KeptRows(self.requests, self.owned, first_slots)


class Travelled:
    """Ids of a batch that have travelled, whose rows may be sent ahead.

    Attributes:
        round: in which they have.
        requests: of what comes as rows, at the owners.
        parts: the same where some rows can be sent while the batch before is trained on.
        next: ids of the batch behind it, once these have travelled.
        rows_ahead: rows of it that were sent ahead.
    """

    def __init__(self, number: int, requests: dict[Layout, Requests]) -> None:
        """`number`: of the round."""
        self.round, self.requests = number, requests
        self.parts: list[SentInParts] = []
        self.next: Travelled | None = None
        self.rows_ahead: RowsAhead | None = None

    @property
    def has_good_rows(self) -> bool:
        """Return True if rows were sent ahead, and none has changed since."""
        return self.rows_ahead is not None and self.rows_ahead.is_good

    def take_rows(self, are_good: bool) -> None:
        """Have the lookup use rows that were sent ahead; or drop them, and all rows come with it."""
        self.rows_ahead = None
        for part in () if are_good else self.parts:
            part.drop()

    @property
    def has_steady_rows(self) -> bool:
        """Return True if none of its rows here changes in the step of the batch before but those that this
        one asks for."""
        return bool(self.parts) and not any(live.follows for live in self.shards())

    def shards(self) -> list[LiveTable]:
        """Return the shards of this rank whose rows are asked for."""
        return [live for part in self.parts for live in live_shards(part.layout)]


class Divides(Protocol):
    """Ids that were sent on a route.

    Attributes:
        layout: by which they were ordered.
        at_owners: what owners are asked for.
    """

    @property
    def layout(self) -> Layout: ...
    @property
    def at_owners(self) -> Requests: ...

    def divide(self, messenger: Gathering, before: Requests) -> SentInParts:
        """Have the rows come in parts, by what the batch before asks for. Called by all ranks."""


class RowsAhead:
    """Rows of the next batch on their way: good for its lookup, unless others have changed meanwhile than
    those of the present batch."""

    def __init__(
        self, ranks: Ranks, beside: Beside, sent: Travelled, lookups: Sequence[KeptLookup]
    ) -> None:
        """Begin to send them. Called by all ranks.

        Args:
            sent: the next batch's ids.
            lookups: of the present batch.
        """
        # Not the lookups themselves, which hold rows.
        self._lookups = [weakref.ref(lookup) for lookup in lookups]
        self._tables = {number for part in sent.parts for number in part.tables}
        self._shards = sent.shards()
        self._rewrites = self._count_rewrites()
        self._is_stale = False
        for part in sent.parts:
            try:
                part.begin(beside)
            except Exception:  # of this rank alone; the lookup itself will raise it on all
                self._is_stale = True
        ranks.waiting.listeners.add(self)

    def hear(self, lookup: KeptLookup) -> None:
        """Take note that gradients of a lookup come to the owners, on all ranks."""
        others = not any(lookup is one() for one in self._lookups)
        if others and not self._tables.isdisjoint(lookup.layout.table_numbers):
            self._is_stale = True

    @property
    def is_good(self) -> bool:
        if self._is_stale or any(live.follows for live in self._shards):
            return False  # of an optimizer that was made meanwhile
        return self._count_rewrites() == self._rewrites

    def _count_rewrites(self) -> list[int]:
        return [live.place.rewrites for live in self._shards]
