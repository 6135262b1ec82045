"""Rows of a table that ranks share: asked of all of them, or of this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hotbed.dist.delivery import deliver, fetch_by_id, owned_ids
from hotbed.dist.exchange import order_by_owner, send_ids
from hotbed.dist.exchanged_values import IdsByOwner, Requests
from hotbed.dist.gathered import gathered
from hotbed.dist.handshake import Handshake
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import bytes_of, exchange
from hotbed.dist.shards import Shard, ShardedPlace
from hotbed.errors import TableError
from hotbed.table.records import Records

__all__ = ["ShardedRows"]


class ShardedRows(ShardedPlace):
    """Rows by id. What all ranks share is read and written by all of them together."""

    ranks: Ranks

    # -- rows of all ranks -----------------------------------------------------------------------

    def read(self, ids: Tensor) -> Tensor:
        """Called by all ranks, each with ids of its own."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        by_owner, opened = self._asked("a lookup of rows", distinct)
        requests = send_ids(self.ranks, by_owner, opened.values)
        rows = torch.empty((len(distinct), self.spec.dim), dtype=self.spec.dtype, device="cpu")
        messages = fetch_by_id(self.ranks, requests)
        requests.core.read_rows([some.data_ptr() for some in messages], [rows.data_ptr()])
        return rows[by_owner.renumbered(0, inverse)]

    def assign(self, ids: Tensor, values: Tensor) -> None:
        """Called by all ranks, each with rows of its own; of an id that several give the last one's stays."""
        by_owner, opened = self._asked("an assignment", ids)
        self.assign_asked(send_ids(self.ranks, by_owner, opened.values), values.to(self.spec.dtype))

    def assign_asked(self, requests: Requests, values: Tensor) -> None:
        """Write the rows that all ranks have told of. Called by all ranks.

        Args:
            values: (n, dim) of this rank, in the order in which it was asked for them.
        """
        rows = deliver(self.ranks, requests, values)
        fault: Exception | None = None
        try:
            for live, own, _ in rows:
                live.ready()
                live.core.reserve(len(live) + len(own))
        except Exception as error:
            fault = error
        self.ranks.vote("an assignment", fault=fault)
        try:
            for live, own, weights in rows:
                live.assign(own, weights)
        except Exception as error:  # of a tier, say: some rows are written
            fault = error
        self.ranks.vote("an assignment", fault=fault)

    def contains(self, ids: Tensor) -> Tensor:
        """Called by all ranks, each with ids of its own."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        by_owner, opened = self._asked("a search for ids", distinct)
        there = self.search_asked(send_ids(self.ranks, by_owner, opened.values), len(distinct))
        return there[by_owner.renumbered(0, inverse)]

    def search_asked(self, requests: Requests, count: int) -> Tensor:
        """Return (count,) bool: whether the rows are stored that this rank asks for, in the order of their
        owners. Called by all ranks."""
        rank = self.ranks.rank
        answers: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        for (live, own, counts), shard in zip(owned_ids(requests), self.own, strict=True):
            found = live.contains(own).split_with_sizes(counts)
            for to, piece in enumerate(found if self._speaks(shard) else ()):
                answers[to].append(bytes_of(piece))
        parts: list[list[slice]] = [[] for _ in range(self.ranks.size)]
        for s, shard in enumerate(self.shards):
            if self._speaks(shard):
                parts[shard.rank].append(requests.requests_of(rank, s))
        sizes = [sum(part.stop - part.start for part in some) for some in parts]
        there = torch.empty(count, dtype=torch.bool, device="cpu")
        told = exchange(self.ranks, "a search for ids", answers, sizes)
        for some, message in zip(parts, told, strict=True):
            pieces = message.split_with_sizes([part.stop - part.start for part in some])
            for part, piece in zip(some, pieces, strict=True):
                there[part] = piece.bool()
        return there

    def erase(self, ids: Tensor) -> int:
        """Called by all ranks, each with ids of its own."""
        by_owner, opened = self._asked("a deletion of rows", torch.unique(ids))
        return self.erase_asked(send_ids(self.ranks, by_owner, opened.values))

    def erase_asked(self, requests: Requests) -> int:
        """Erase the rows that all ranks have told of, and return how many there were. Called by all ranks."""
        spoken, fault = 0, None
        try:
            for (live, own, _), shard in zip(owned_ids(requests), self.own, strict=True):
                gone = live.erase(torch.unique(own))
                spoken += gone if self._speaks(shard) else 0
        except Exception as error:  # of this rank, which the others hear of
            fault = error
        told = self.ranks.handshake("a deletion of rows", [spoken], [self.number], fault)
        return int(told.values.sum())

    def count(self) -> int:
        """Called by all ranks."""
        self.ranks.handshake("a count of rows", tables=[self.number])
        return self.count_asked()

    def count_asked(self) -> int:
        """Return how many rows all ranks keep, who have told each other that they count. Called by all."""
        own = [len(live) for shard, live in self.own.items() if self._speaks(shard)]
        told = self.ranks.handshake("a count of rows", [sum(own)], [self.number])
        return int(told.values.sum())

    def refuse_copy_beyond_memory(self, purpose: str) -> None:
        """`gathered` does, by what the ranks have together."""

    def all_rows(self, *, everywhere: bool = True) -> tuple[Tensor, Tensor] | None:
        """Called by all ranks."""
        found = gathered(self.ranks, self, states=False, everywhere=everywhere)
        return None if found is None else (found.ids, found.weights)

    def all_states(self) -> tuple[Tensor, Sequence[Tensor]] | None:
        """Called by all ranks."""
        found = gathered(self.ranks, self, states=True, everywhere=False)
        return None if found is None else (found.ids, found.states)

    def _asked(self, kind: str, ids: Tensor) -> tuple[IdsByOwner, Handshake]:
        """Order ids by their owners, and open an exchange of `kind` with them."""
        by_owner = order_by_owner(self.ranks.layout([self]), ids, [len(ids)])
        return by_owner, self.ranks.handshake(kind, by_owner.counts_to_owners, [self.number])

    def _speaks(self, shard: Shard) -> bool:
        """Whether the rows of a shard count: columns and copies of them do once."""
        return shard.part.origin.column == 0 and not (shard.replica and shard.rank)

    # -- rows of this rank -----------------------------------------------------------------------

    def set_key(self, key: int) -> None:
        super().set_key(key)
        for live in self.own.values():
            live.set_key(key)

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        """Stream rows of this rank; whole rows only."""
        for shard, live in self.own.items():
            if shard.part.dim != self.spec.dim:
                raise TableError(
                    f"Table {self.core.name!r} is kept by columns; no rank has whole rows of it."
                )
            origin = shard.part.origin
            for rows in live.place.records(states=states, current=current):
                yield rows._replace(ids=origin.ids_in_table(rows.ids))

    def write(self, records: Records) -> None:
        """Write those of the rows that this rank owns."""
        ids, weights, states, steps = records
        for shard, live in self.own.items():
            own, here = shard.part.origin.ids_in_part(ids)
            at, columns = slice(None) if here is None else here, shard.part.columns
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
