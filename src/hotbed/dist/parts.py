"""A call of which some tables come as rows, and others as vectors of bags that the owners have pooled."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from hotbed import _core
from hotbed.dist.bags import (
    BagsBatch,
    BagsOfCall,
    BagsPendingGradient,
)
from hotbed.dist.by_machine import ByMachine
from hotbed.dist.exchanged_values import Gathering, OwnedInputs, PendingOnRanks
from hotbed.dist.layout import Layout
from hotbed.dist.ranks import Ranks
from hotbed.dist.rows_batch import (
    Direct,
    Route,
    RowsBatch,
    RowsOfCall,
    ShardedPendingGradient,
)
from hotbed.dist.shards import ShardedPlace
from hotbed.places.host.batch import HostPendingGradient, OnHost, core_batch, places_in
from hotbed.table.gradients import GradientShare
from hotbed.table.lookups import Call
from hotbed.table.resolved import Columns

__all__ = ["Asked", "PartsOfCall", "parts_of", "route_to"]


class Asked(Protocol):
    """Requests that a rank is to make of owners.

    Attributes:
        numbers: what the other ranks must know before `fetch`.
    """

    numbers: list[int]

    def send(self, messenger: Gathering, numbers: Tensor) -> None:
        """Bring ids to their owners. Called by all ranks.

        Args:
            numbers: (ranks, n) int64 of all ranks.
        """

    def owned(self) -> list[OwnedInputs]:
        """Return what ranks ask of the shards of this rank, in one lookup each. After `send`."""

    def by_rows(self) -> list[RowsOfCall]:
        """Return the parts that come as rows."""

    def use(self, call: Call, given: _core.Batch) -> None:
        """Fetch for a call with the same ids, whose batch `given` is."""

    def fetch(self, wanted: bool) -> RowsBatch | BagsBatch | JoinedBatch:
        """Have owners look it up, and wait for what comes. After `send`. Called by all ranks.

        Args:
            wanted: True if gradients may come.
        """


class _Part(NamedTuple):
    """Tables of a call that go one way."""

    asked: RowsOfCall | BagsOfCall
    features: list[int]
    """Positions of its features in the whole call."""
    tables: list[int]
    """Positions of its tables there."""


class PartsOfCall:
    """Requests by rows, then by bags; of these, features come in the order of their tables.

    Attributes:
        numbers: as of `Asked`.
    """

    def __init__(
        self,
        ranks: Ranks,
        call: Call,
        given: _core.Batch,
        places: Sequence[ShardedPlace],
        ways: Sequence[int],
    ) -> None:
        """
        Args:
            given: the checked batch of the call; places: of its tables.
            ways: for each table, how many features it has if owners pool their bags, else 0.
        """
        self._call = call
        self._parts: list[_Part] = []
        for by_owners, tables in parts_of(places, ways):
            features = [f for f, t in enumerate(call.table_of) if t in tables]
            if by_owners:
                features.sort(key=lambda f: call.table_of[f])
            part = _part_of(call, tables, features)
            own = [places[t] for t in tables]
            asked: BagsOfCall | RowsOfCall
            if by_owners:
                asked = BagsOfCall(ranks, part, given, features, own)
            else:
                asked = RowsOfCall(ranks, part, _batch_of(part), route_to(ranks, own))
            self._parts.append(_Part(asked, features, tables))
        self.numbers = [number for part in self._parts for number in part.asked.numbers]

    def send(self, messenger: Gathering, numbers: Tensor) -> None:
        begin = 0
        for part in self._parts:
            end = begin + len(part.asked.numbers)
            part.asked.send(messenger, numbers[:, begin:end])
            begin = end

    def owned(self) -> list[OwnedInputs]:
        return [owned for part in self._parts for owned in part.asked.owned()]

    def by_rows(self) -> list[RowsOfCall]:
        return [rows for part in self._parts for rows in part.asked.by_rows()]

    def use(self, call: Call, given: _core.Batch) -> None:
        self._call = call
        for asked, features, tables in self._parts:
            part = _part_of(call, tables, features)
            asked.use(part, _batch_of(part))

    def fetch(self, wanted: bool) -> RowsBatch | BagsBatch | JoinedBatch:
        made = [(part, part.asked.fetch(wanted)) for part in self._parts]
        part, batch = made[0]
        if part.features == list(range(len(self._call.bags))):
            return batch
        return JoinedBatch(self._call, made, wanted)


def parts_of(
    places: Sequence[ShardedPlace], ways: Sequence[int]
) -> Iterator[tuple[bool, list[int]]]:
    """Yield the parts of a call: whether owners pool their bags, and positions of their tables.

    Args:
        places: of the tables; ways: as of `PartsOfCall`.
    """
    for by_owners, by_machine in ((False, False), (False, True), (True, False)):
        tables = [
            t
            for t, (place, way) in enumerate(zip(places, ways, strict=True))
            if bool(way) is by_owners and (way or place.by_machine is by_machine)
        ]
        if tables:
            yield by_owners, tables


_routes: weakref.WeakKeyDictionary[Layout, ByMachine] = weakref.WeakKeyDictionary()
"""By the layout of the same tables among all ranks."""


def route_to(ranks: Ranks, places: Sequence[ShardedPlace]) -> Route:
    """Return the route to the owners of tables, of which all, or none, are `by_machine`."""
    layout = ranks.layout(places)
    if not places[0].by_machine:
        return Direct(layout)
    found = _routes.get(layout)
    if found is None:  # or another thread makes it, too
        found = _routes.setdefault(layout, ByMachine(ranks, places))
    return found


def _part_of(call: Call, tables: Sequence[int], features: Sequence[int]) -> Call:
    """Return the call of some tables and features alone."""
    at = {t: n for n, t in enumerate(tables)}
    return Call(
        [call.live[t] for t in tables],
        [at[call.table_of[f]] for f in features],
        [call.names[f] for f in features],
        [call.bags[f] for f in features],
        [at[t] for t in call.frozen if t in at],
        call.training,
    )


def _batch_of(call: Call) -> _core.Batch:
    return core_batch(call.live, call.table_of, call.bags)


class JoinedBatch(OnHost):
    """`hotbed.table.resolved.Resolved`."""

    has_own_rows = True

    def __init__(
        self, call: Call, parts: Sequence[tuple[_Part, RowsBatch | BagsBatch]], wants_gradient: bool
    ) -> None:
        self.live, self.table_of, self.bags = call.live, call.table_of, call.bags
        self.wants_gradient = wants_gradient
        self._parts = parts

    def pool(self, columns: Sequence[Columns]) -> None:
        places = places_in(columns, self)
        for part, batch in self._parts:
            batch.write([places[f] for f in part.features])

    def copy_messages(self) -> None:
        """As of `BagsBatch`."""
        for _, batch in self._parts:
            batch.copy_messages()

    def keep_inputs(self) -> None:
        for _, batch in self._parts:
            batch.keep_inputs()

    def backward(self, grads: Sequence[Tensor | None]) -> _JoinedPendingGradient:
        return _JoinedPendingGradient(
            [
                (part, batch.backward([grads[f] for f in part.features]))
                for part, batch in self._parts
            ]
        )

    def weight_gradients(
        self, left: _JoinedPendingGradient, outputs: dict[int, Tensor], wanted: Sequence[int]
    ) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for (part, batch), (_, own) in zip(self._parts, left.parts, strict=True):
            at = {f: n for n, f in enumerate(part.features)}
            here = [f for f in wanted if f in at]
            if here:
                of_part = {at[f]: out for f, out in outputs.items() if f in at}
                pending = cast(HostPendingGradient, own)
                grads = batch.weight_gradients(pending, of_part, [at[f] for f in here])
                found.update(zip(here, grads, strict=True))
        return [found[f] for f in wanted]


class _JoinedPendingGradient(PendingOnRanks):
    """`hotbed.table.backward.PendingGradient`."""

    def __init__(
        self, parts: list[tuple[_Part, ShardedPendingGradient | BagsPendingGradient]]
    ) -> None:
        self.parts = parts

    def shares(self, tables: Sequence[int]) -> list[GradientShare]:
        found: dict[int, GradientShare] = {}
        for part, own in self.parts:
            at = {t: n for n, t in enumerate(part.tables)}
            here = [t for t in tables if t in at]
            if here:
                found.update(zip(here, own.shares([at[t] for t in here]), strict=True))
        return [found[t] for t in tables]

    def slots(self, table: int) -> Tensor:
        part, own = next(one for one in self.parts if table in one[0].tables)
        return own.slots(part.tables.index(table))
