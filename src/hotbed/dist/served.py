"""The part of a rank without a batch in what the others look up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.bags import BagRequests, keep_bags, pool_bags, send_bags, width
from hotbed.dist.exchange import keep, no_ids
from hotbed.dist.exchanged_values import Gathering, OwnedInputs
from hotbed.dist.parts import parts_of, route_to
from hotbed.dist.ranks import Ranks
from hotbed.dist.rows_ahead import Divides
from hotbed.dist.rows_batch import RowsOnRoute
from hotbed.dist.shards import ShardedPlace
from hotbed.dist.ways import AHEAD, BITS, bits, other_ways, refuse_other_modes

__all__ = ["ServedLookup"]


class _Served(Protocol):
    """A part of the others' call, on a rank that has no batch.

    Attributes:
        width: how many numbers a rank tells of it.
    """

    width: int

    def send(self, messenger: Gathering, numbers: Tensor) -> None:
        """Take part in sending ids. Arguments are those of `hotbed.dist.parts.Asked.send`."""

    def owned(self, frozen: Sequence[int]) -> OwnedInputs:
        """Return what is asked of the shards of this rank, after `send`."""

    def by_rows(self) -> list[Divides]:
        """Return it, if it comes as rows."""

    def fetch(self, frozen: list[int], training: bool, keeps: bool) -> None:
        """Look up what the others ask for. `keeps`: gradients may come."""


class _ServedRows(RowsOnRoute):
    def __init__(self, ranks: Ranks, places: Sequence[ShardedPlace]) -> None:
        self._ranks, self._route = ranks, route_to(ranks, places)
        self._by_owner = no_ids(self.layout)
        self.width: int = self.layout.core.numbers

    def owned(self, frozen: Sequence[int]) -> OwnedInputs:
        return self._sent.owned(frozen)

    def by_rows(self) -> list[Divides]:
        return [self]

    def fetch(self, frozen: list[int], training: bool, keeps: bool) -> None:
        answer = self._sent.fetch(self._ranks, frozen, training, keeps)
        if keeps:
            keep(self._ranks, None, answer)


class _ServedBags:
    _requests: BagRequests

    def __init__(self, ranks: Ranks, places: Sequence[ShardedPlace]) -> None:
        self._ranks, self._layout = ranks, ranks.layout(places)
        self.width = width(self._layout)

    def send(self, messenger: Gathering, numbers: Tensor) -> None:
        none = _core.OrderedBags(self._layout.core)
        self._requests = send_bags(messenger, self._layout, none, numbers)

    def owned(self, frozen: Sequence[int]) -> OwnedInputs:
        return OwnedInputs(self._layout, self._requests.bags_here, frozen)

    def by_rows(self) -> list[Divides]:
        return []

    def fetch(self, frozen: list[int], training: bool, keeps: bool) -> None:
        answer = pool_bags(self._ranks, self._requests, frozen, training)
        if keeps:
            keep_bags(self._ranks, None, answer)


def _parts_without_batch(
    ranks: Ranks, places: Sequence[ShardedPlace], ways: Sequence[int]
) -> Iterator[tuple[list[int], _Served]]:
    """The same parts on a rank that has no batch, with positions of their tables."""
    for by_owners, tables in parts_of(places, ways):
        own = [places[t] for t in tables]
        if by_owners:
            of_features = [
                place for place, t in zip(own, tables, strict=True) for _ in range(ways[t])
            ]
            yield tables, _ServedBags(ranks, of_features)
        else:
            yield tables, _ServedRows(ranks, own)


class ServedLookup:
    """A lookup of the others, of which this rank answers for its shards."""

    def __init__(
        self, parts: list[tuple[list[int], _Served]], numbers: Tensor, frozen: set[int]
    ) -> None:
        """
        Args:
            parts: with positions of their tables.
            numbers: (ranks, n) int64 of all ranks, of one part after the other.
            frozen: positions of tables that take no new rows.
        """
        self._parts, self._numbers, self._frozen = parts, numbers, frozen

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        tables: Sequence[int],
        values: Tensor,
        ended: Sequence[bool],
        modes: int,
    ) -> ServedLookup | None:
        """Return what the others look up; None: they tell each other anew.

        Args:
            tables: their numbers.
            values: (ranks, n) int64 that all ranks have told; ended: ranks without batches.
            modes: how many modes of the lookup lie before its frozen tables.

        Raises:
            PeerError: the others want different things, of which they hear as well.
        """
        speaks, count = ended.index(False), len(tables)
        ways_at = AHEAD + modes + len(bits((), count))
        begin = ways_at + count
        refuse_other_modes(values, ended, speaks, ways_at - AHEAD)
        if other_ways(values, ended, ways_at, begin):
            return None
        which: list[int] = values[speaks, AHEAD + modes : ways_at].tolist()
        ways: list[int] = values[speaks, ways_at:begin].tolist()
        frozen = {t for t in range(count) if which[t // BITS] >> t % BITS & 1}
        places = [ranks.table(number).place for number in tables]
        return cls(list(_parts_without_batch(ranks, places, ways)), values[:, begin:], frozen)

    def send(self, messenger: Gathering) -> None:
        """Take part in sending ids."""
        begin = 0
        for _, part in self._parts:
            part.send(messenger, self._numbers[:, begin : begin + part.width])
            begin += part.width

    def owned(self) -> list[OwnedInputs]:
        """Return what is asked of the shards of this rank, in one lookup each. After `send`."""
        return [part.owned(self._never(tables)) for tables, part in self._parts]

    def by_rows(self) -> list[Divides]:
        """Return the parts that come as rows."""
        return [rows for _, part in self._parts for rows in part.by_rows()]

    def fetch(self, training: bool, wanted: bool) -> None:
        """Look up what is asked for. `wanted`: True if gradients may come."""
        for tables, part in self._parts:
            with torch.set_grad_enabled(wanted):
                part.fetch(self._never(tables), training, wanted)

    def _never(self, tables: Sequence[int]) -> list[int]:
        return [at for at, t in enumerate(tables) if t in self._frozen]
