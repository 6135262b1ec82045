"""Distinct ids that a rank asks for, their ways to the owners, and a batch whose rows were fetched."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.exchange import Fetched, fetch, ids_here, keep, order_by_owner, send_ids
from hotbed.dist.exchanged_values import (
    Answer,
    Gathering,
    IdsByOwner,
    KeptLookup,
    OwnedInputs,
    PendingOnRanks,
    Requests,
)
from hotbed.dist.layout import Layout
from hotbed.dist.ranks import Ranks
from hotbed.dist.rows_ahead import SentInParts, divided
from hotbed.places.host.batch import HostBatch, HostPendingGradient
from hotbed.table.gradients import GradientRows
from hotbed.table.lookups import Call

__all__ = [
    "Direct",
    "Route",
    "RowsBatch",
    "RowsOfCall",
    "RowsOnRoute",
    "Sent",
    "SentDirectly",
    "ShardedPendingGradient",
]


class Sent(Protocol):
    """Ids that all ranks have sent on a route.

    Attributes:
        requests: what came of the first exchange of them.
        at_owners: what owners are asked for.
    """

    @property
    def requests(self) -> Requests: ...
    @property
    def at_owners(self) -> Requests: ...

    def owned(self, frozen: Sequence[int]) -> OwnedInputs:
        """Return what is asked of the shards of this rank. `frozen`: of the tables that are asked for."""

    def fetch(self, ranks: Ranks, frozen: Sequence[int], training: bool, wanted: bool) -> Answer:
        """Do as `hotbed.dist.exchange.fetch`. `wanted`: True if gradients may come."""

    def in_parts(
        self, messenger: Gathering, before: Requests, tables: Sequence[int]
    ) -> tuple[Sent, SentInParts]:
        """Return the same with rows that come from the owners in two parts, and what so comes. Called by all
        ranks.

        Args:
            before: what the batch before asks of the owners.
            tables: numbers of the tables.
        """


class Route(Protocol):
    """How ids come to the owners of their rows, and rows back.

    Attributes:
        layout: by which ids are ordered before they are sent.
    """

    @property
    def layout(self) -> Layout: ...

    def send(self, messenger: Gathering, by_owner: IdsByOwner, numbers: Tensor) -> Sent:
        """Do as `hotbed.dist.exchange.send_ids`."""


class Direct(NamedTuple):
    """`Route` from each rank to each owner."""

    layout: Layout

    def send(self, messenger: Gathering, by_owner: IdsByOwner, numbers: Tensor) -> Sent:
        return SentDirectly(send_ids(messenger, by_owner, numbers))


class SentDirectly(NamedTuple):
    """`Sent` from each rank to each owner; its rows come all at once."""

    requests: Requests

    @property
    def at_owners(self) -> Requests:
        return self.requests

    def owned(self, frozen: Sequence[int]) -> OwnedInputs:
        return OwnedInputs(self.requests.by_owner.layout, ids_here(self.requests), frozen)

    def fetch(self, ranks: Ranks, frozen: Sequence[int], training: bool, wanted: bool) -> Fetched:
        return fetch(ranks, self.requests, frozen, training)

    def in_parts(
        self, messenger: Gathering, before: Requests, tables: Sequence[int]
    ) -> tuple[SentInParts, SentInParts]:
        made = divided(messenger, before, self.requests, tables)
        return made, made


class RowsOnRoute:
    """Ids that a rank asks for, and their rows, which come here by a route. Who inherits sets the first
    three attributes."""

    _ranks: Ranks
    _route: Route
    _by_owner: IdsByOwner
    _sent: Sent

    @property
    def layout(self) -> Layout:
        return self._route.layout

    @property
    def at_owners(self) -> Requests:
        return self._sent.at_owners

    def send(self, messenger: Gathering, numbers: Tensor) -> None:
        """Bring the ids to their owners. Arguments are those of `hotbed.dist.parts.Asked.send`."""
        self._sent = self._route.send(messenger, self._by_owner, numbers)

    def divide(self, messenger: Gathering, before: Requests) -> SentInParts:
        """As of `hotbed.dist.rows_ahead.Divides`, after `send`."""
        self._sent, made = self._sent.in_parts(messenger, before, self.layout.table_numbers)
        return made


class RowsOfCall(RowsOnRoute):
    """Distinct ids of a call, whose rows are to come here. Attributes and methods are those of
    `hotbed.dist.parts.Asked`."""

    def __init__(self, ranks: Ranks, call: Call, given: _core.Batch, route: Route) -> None:
        """`given`: the checked batch of the call; `route`: to the owners of its tables."""
        self._ranks, self._call, self._given, self._route = ranks, call, given, route
        ids = torch.empty(given.positions, dtype=torch.int64, device="cpu")
        self._inverse = torch.empty_like(ids)
        counts = _core.distinct_ids(given, ids.data_ptr(), self._inverse.data_ptr())
        self._by_owner = order_by_owner(route.layout, ids, counts)
        self.numbers = self._by_owner.counts_to_owners

    def owned(self) -> list[OwnedInputs]:
        return [self._sent.owned(self._call.frozen)]

    def by_rows(self) -> list[RowsOfCall]:
        return [self]

    def use(self, call: Call, given: _core.Batch) -> None:
        self._call, self._given = call, given

    def fetch(self, wanted: bool) -> RowsBatch:
        ranks, call, by_owner = self._ranks, self._call, self._by_owner
        answer = self._sent.fetch(ranks, call.frozen, call.training, wanted)
        rows = answer.copy_out()
        positions = by_owner.new_positions.data_ptr(), self._inverse.data_ptr()
        core = rows.batch(self._given, by_owner.counts, *positions)
        core.resolve(False, wanted, call.frozen)
        made = RowsBatch(core, call, wanted, kept=(rows, self._inverse))
        weakref.finalize(made, by_owner.layout.give_back, rows).atexit = False
        if wanted:
            made.lookup = keep(ranks, made, answer)
        return made


class RowsBatch(HostBatch):
    """Its rows lie beside it as long as it does.

    Attributes:
        lookup: which the ranks keep for its gradients; only where they are wanted.
    """

    lookup: KeptLookup
    has_own_rows = True

    def copy_messages(self) -> None:
        """As of `BagsBatch`; rows are copies already."""

    @property
    def claim(self) -> RowsBatch:
        """The batch itself: while it lives, ranks keep its `KeptLookup`, and owners its rows."""
        return self

    def backward(self, grads: Sequence[Tensor | None]) -> Any:
        return ShardedPendingGradient(super().backward(grads), self.lookup.first_slots)


class ShardedPendingGradient(PendingOnRanks):
    """Gradients of one backward, by slots of `Sharded`: `first_slots` of a table plus the batch's own."""

    def __init__(self, left: HostPendingGradient, first_slots: Sequence[int]) -> None:
        self._left, self._first_slots = left, first_slots
        self.places = left.places

    def shares(self, tables: Sequence[int]) -> list[GradientRows]:
        shares = self._left.shares(tables)
        if not any(self._first_slots):
            return shares
        return [
            GradientRows(
                share.slots + self._first_slots[t],
                share.rows,
                share.distinct,
                share.finite,
                share.claim,
            )
            for t, share in zip(tables, shares, strict=True)
        ]

    def slots(self, table: int) -> Tensor:
        return self._left.slots(table) + self._first_slots[table]
