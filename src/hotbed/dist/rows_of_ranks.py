"""Rows of a table that ranks share: asked of all of them, or of this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.dist.exchange import Exchange
from hotbed.dist.gathered import gathered
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import bytes_of
from hotbed.dist.shards import Shard
from hotbed.errors import HotbedError, TableError
from hotbed.table.protocols import RowCopies
from hotbed.table.records import Records

__all__ = ["ShardedRows"]


class ShardedRows(RowCopies):
    """Rows by id. What all ranks share is read and written by all of them together."""

    ranks: Ranks
    number: int
    shares: list[Shard]
    own: dict[Shard, Any]

    # -- rows of all ranks -----------------------------------------------------------------------

    def read(self, ids: Tensor) -> Tensor:
        """Called by all ranks, each with ids of its own."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        trip = Exchange(self.ranks, [self], [distinct])
        opened = self.ranks.agree("a lookup of rows", trip.numbers, [self.number])
        rows = torch.empty((len(distinct), self.spec.dim), dtype=self.spec.dtype)
        with torch.no_grad():
            messages = trip.fetch(opened.numbers, [], False)
        trip.exchange.take_rows([some.data_ptr() for some in messages], [rows.data_ptr()])
        return rows[trip.renumbered(0, inverse)]

    def assign(self, ids: Tensor, values: Tensor) -> None:
        """Called by all ranks, each with rows of its own; of an id that several give the last one's stays."""
        trip = Exchange(self.ranks, [self], [ids])
        told = self.ranks.agree("an assignment", trip.numbers, [self.number]).numbers
        rows = trip.deliver(told, values.to(self.spec.dtype))
        fault: HotbedError | None = None
        try:
            for live, own, _ in rows:
                live.ready()
                live.core.reserve(len(live) + len(own))
        except HotbedError as error:
            fault = error
        self.ranks.agree("an assignment", fault=fault)
        for live, own, weights in rows:
            live.assign(own, weights)

    def contains(self, ids: Tensor) -> Tensor:
        """Called by all ranks, each with ids of its own."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        trip, kind = Exchange(self.ranks, [self], [distinct]), "a search for ids"
        told = self.ranks.agree(kind, trip.numbers, [self.number]).numbers
        answers: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        for (live, own, _), share in zip(trip.deliver(told, None), self.own, strict=True):
            s = self.shares.index(share)
            asks = [trip.exchange.count(rank, s) for rank in range(self.ranks.size)]
            found = live.contains(own).split(asks)
            for rank, some in enumerate(found if self._speaks(share) else ()):
                answers[rank].append(bytes_of(some))
        asked: list[list[slice]] = [[] for _ in range(self.ranks.size)]
        for s, share in enumerate(self.shares):
            if self._speaks(share):
                asked[share.rank].append(trip.asked_of(s))
        sizes = [sum(part.stop - part.start for part in parts) for parts in asked]
        there = torch.empty(len(distinct), dtype=torch.bool)
        for parts, block in zip(asked, self.ranks.exchange(kind, answers, sizes), strict=True):
            pieces = block.split([part.stop - part.start for part in parts])  # type: ignore[no-untyped-call]
            for part, piece in zip(parts, pieces, strict=True):
                there[part] = piece.bool()
        return there[trip.renumbered(0, inverse)]

    def erase(self, ids: Tensor) -> int:
        """Called by all ranks, each with ids of its own."""
        trip = Exchange(self.ranks, [self], [torch.unique(ids)])
        told = self.ranks.agree("a deletion of rows", trip.numbers, [self.number]).numbers
        rows = trip.deliver(told, None)
        gone = [live.erase(torch.unique(own)) for live, own, _ in rows]
        spoken = [n for n, share in zip(gone, self.own, strict=True) if self._speaks(share)]
        told = self.ranks.agree("a deletion of rows", [sum(spoken)], [self.number]).numbers
        return int(told.sum())

    def count(self) -> int:
        """Called by all ranks."""
        own = [len(live) for share, live in self.own.items() if self._speaks(share)]
        told = self.ranks.agree("a count of rows", [sum(own)], [self.number]).numbers
        return int(told.sum())

    def refuse_copy_beyond_memory(self, purpose: str) -> None:
        """`gathered` does, by what the ranks have together."""

    def all_rows(self, *, everywhere: bool = True) -> tuple[Tensor, Tensor] | None:
        """Called by all ranks."""
        found = gathered(self, states=False, everywhere=everywhere)
        return None if found is None else (found.ids, found.weights)

    def all_states(self) -> tuple[Tensor, Sequence[Tensor]] | None:
        """Called by all ranks."""
        found = gathered(self, states=True, everywhere=False)
        return None if found is None else (found.ids, found.states)

    def _speaks(self, share: Shard) -> bool:
        """Whether the rows of a share count: columns and copies of them do once."""
        return share.part.origin.column == 0 and not (share.replica and share.rank)

    # -- rows of this rank -----------------------------------------------------------------------

    def set_key(self, key: int) -> None:
        super().set_key(key)
        for live in self.own.values():
            live.set_key(key)

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        """Stream rows of this rank; whole rows only."""
        for share, live in self.own.items():
            if share.part.dim != self.spec.dim:
                raise TableError(
                    f"Table {self.core.name!r} is kept by columns; no rank has whole rows of it."
                )
            origin = share.part.origin
            for rows in live.place.records(states=states, current=current):
                yield rows._replace(ids=origin.ids_in_table(rows.ids))

    def write(self, records: Records) -> None:
        """Write those of the rows that this rank owns."""
        ids, weights, states, steps = records
        for share, live in self.own.items():
            own, here = share.part.origin.ids_in_part(ids)
            at, columns = slice(None) if here is None else here, share.part.columns
            cut = [
                s[at] if s.shape[1] == 1 else s[at][:, columns].contiguous() for s in states or ()
            ]
            live.write(
                Records(
                    own,
                    None if weights is None else weights[at][:, columns].contiguous(),
                    None if states is None else cut,
                    None if steps is None else steps[at],
                )
            )

    def forget(self) -> None:
        for live in self.own.values():
            live.forget_rows()

    def memory(self) -> dict[str, int]:
        """Return the bytes on this rank."""
        found: dict[str, int] = {}
        for live in self.own.values():
            for what, size in live.memory().items():
                found[what] = found.get(what, 0) + size
        return found or dict.fromkeys(("rows", "weights", "states", "index", "total"), 0)
