"""A batch across ranks: distinct ids to their keepers, rows back, and later gradients the same way.

Shapes: n distinct ids of a table that this rank asks for, m ids that a rank asks this one for.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.dist.layout import Layout
from hotbed.dist.ranks import Ranks
from hotbed.dist.rows import Form, Rows, cut, dealt, inverse_of
from hotbed.dist.wire import block
from hotbed.errors import TableError
from hotbed.group.lookup import looked_up
from hotbed.inputs.bags import Bags
from hotbed.table.lookups import Call

__all__ = ["Trip"]


class Trip:
    """One batch of tables of the same ranks.

    Attributes:
        places: of the tables.
        position: of each table among them, by its number.
        asked: (n,) int64 distinct ids of each, ordered by their keepers where rows are dealt out.
        first_slots: of the n slots that they have in their places, if a gradient may come.
    """

    first_slots: list[int]

    def __init__(self, ranks: Ranks, places: Sequence[Any], ids: Sequence[Tensor]) -> None:
        """`ids`: (n,) int64 of each table, in any order."""
        # The ranks keep it while it waits: in a circle, a model that goes would leave its tables behind.
        self.ranks = weakref.proxy(ranks)
        self.places: list[Any] = [weakref.proxy(place) for place in places]
        self.position = {place.number: t for t, place in enumerate(places)}
        self.asked: list[Tensor] = []
        self._moved: list[Tensor | None] = []
        self._layout: Layout = ranks.layout(places)
        self._begins: list[int] = []  # of each shard among the ids that this rank asks for
        self._ends: list[int] = []
        for place, some, dealing in zip(places, ids, self._layout.dealings, strict=True):
            moved = None
            shards = len(place.shares)
            if dealing is None:
                begins, ends = [0] * shards, [some.shape[0]] * shards
            else:
                some, moved, counts = dealt(some, dealing, ranks.size)
                ends = [*itertools.accumulate(counts)]
                begins = [0, *ends[:-1]]
                if shards < ranks.size:  # some ranks keep none
                    begins = [begins[share.rank] for share in place.shares]
                    ends = [ends[share.rank] for share in place.shares]
            self.asked.append(some)
            self._moved.append(moved)
            self._begins += begins
            self._ends += ends
        self._resolved: Any = None
        self._generations: list[int] = []
        self._counts: list[list[int]] = []

    @property
    def numbers(self) -> list[int]:
        """How many ids this rank has for each share."""
        return [end - begin for begin, end in zip(self._begins, self._ends, strict=True)]

    def asked_of(self, s: int) -> slice:
        """Positions in `asked` of the ids that share `s` of the only table keeps."""
        return slice(self._begins[s], self._ends[s])

    def renumbered(self, t: int, positions: Tensor) -> Tensor:
        """What positions among the ids that were given are in `asked`."""
        moved = self._moved[t]
        return positions if moved is None else moved[positions]

    def wait(self, batch: Any) -> None:
        """Stays for the gradients of a batch; None: this rank has none."""
        fresh = not len(self.ranks.waiting)  # no other batch has slots
        self.first_slots = []
        for place, ids in zip(self.places, self.asked, strict=True):
            first = 0 if fresh else place.slots_taken
            self.first_slots.append(first)
            place.slots_taken = first + ids.shape[0]
        self.ranks.waiting.add(batch, self)

    # -- rows to who asks ------------------------------------------------------------------------

    def fetch(self, told: Tensor, frozen: Sequence[int], training: bool) -> list[list[Tensor]]:
        """Rows of each table as they are stored: (any, dim) pieces, in the order of `asked`, which stay until
        the ranks next send something. Called by all ranks.

        Args:
            told: (ranks, shares) the `numbers` of each.
            frozen: positions of tables that take no new rows.
            training: whether new ids of the others get one.
        """
        self._counts = told.tolist()
        ids = self._ids_to_keepers()
        shards, own, every = self._layout.shards, self.ranks.rank, range(self.ranks.size)
        answered = [
            [s for s in self._layout.mine if not shards[s].replica or rank == own] for rank in every
        ]
        sizes = [self._size(rank, answered[rank]) for rank in every]
        messages = self.ranks.take([0 if rank == own else sizes[rank] for rank in every])
        messages[own] = block(sizes[own])
        places = [self._cut(messages[r], r, answered[r]) for r in every]
        fault: Exception | None = None
        try:
            self._look_up(ids, places, frozen, training)
        except Exception as error:
            fault = error
        # A replica sends rows to its own rank only, and of others ids and gradients come.
        asked = [
            [s for s in kept if not shards[s].replica or rank == own]
            for rank, kept in enumerate(self._layout.kept_by)
        ]
        coming = [0 if r == own else self._size(own, asked[r]) for r in every]
        received = self.ranks.send("rows", coming, fault)
        received[own] = messages[own]
        found: list[list[Tensor]] = [[] for _ in self.places]
        columns: dict[int, list[tuple[int, Tensor]]] = {}
        for rank in every:
            pieces = self._cut(received[rank], own, asked[rank])
            for s, piece in zip(asked[rank], pieces, strict=True):
                shard = shards[s]
                if shard.whole:
                    found[shard.table].append(piece)
                else:
                    columns.setdefault(shard.table, []).append((shard.columns.start, piece))
        for t, some in columns.items():
            found[t].append(torch.cat([piece for _, piece in sorted(some, key=_first)], 1))
        return found

    def _look_up(
        self,
        ids: Sequence[Sequence[Tensor]],
        places: Sequence[Sequence[Tensor]],
        frozen: Sequence[int],
        training: bool,
    ) -> None:
        """Look up the rows that this rank owns.

        Args:
            ids: by rank, of each share.
            places: by rank, where the rows of those shares go that it is to have: of all, or, of replicas,
                of none; empty: no rows are wanted.
        """
        layout, live = self._layout, self._layout.own()
        if not live:
            return
        shards = [layout.shards[s] for s in layout.mine]
        table_of: list[int] = []
        bags: list[Bags] = []
        vectors: list[Tensor | None] = []
        converted: list[tuple[Tensor, Tensor]] = []
        given = [iter(of_rank) for of_rank in places]
        for at, shard in enumerate(shards):
            for rank, of_rank in enumerate(ids):
                table_of.append(at)
                bags.append(_bags(of_rank[at]))
                place = None
                if given and not (shard.replica and rank != self.ranks.rank):
                    place = next(given[rank])
                    if shard.stored != shard.computed:
                        wide: Any = block(place.numel() * shard.computed.dtype.itemsize)
                        wide = wide.view(shard.computed.dtype).view(-1, shard.computed.width)
                        converted.append((place, wide))
                        place = wide
                vectors.append(place)
        never = set(frozen)
        here = [at for at, shard in enumerate(shards) if shard.table in never]
        names = [live[at].name for at in table_of]
        self._resolved = looked_up(Call(live, table_of, names, bags, here, training), vectors)
        self._generations = [table.generation for table in live]
        for place, wide in converted:
            place.copy_(wide)

    def take_over(self, told: Tensor) -> None:
        """Resolve the ids at their keepers, for gradients that other trips have left. Called by all ranks.

        Args:
            told: (ranks, shares) the `numbers` of each.
        """
        self._counts = told.tolist()
        self._look_up(self._ids_to_keepers(), [], [], False)

    # -- gradients to keepers --------------------------------------------------------------------

    def give(self, grads: Sequence[Rows | None], wanted: Sequence[int]) -> None:
        """Brings gradients to the keepers, who sum them. Called by all ranks.

        Args:
            grads: (n, dim) of the compute dtype for each table in `wanted`; None: zeros.
            wanted: positions of the tables of which a rank has a gradient.
        """
        layout, chosen = self._layout, set(wanted)
        outgoing = [
            None if (some := grads[shard.table]) is None else self._part_of(some, s)
            for s, shard in enumerate(layout.shards)
        ]
        forms = [shard.computed for shard in layout.shards]
        incoming = self._to_keepers("gradients", outgoing, forms, chosen)
        mine = [at for at, s in enumerate(layout.mine) if layout.shards[s].table in chosen]
        if not mine:
            return
        own = layout.own()
        for live, generation in zip(own, self._generations, strict=True):
            if live.generation != generation:
                raise TableError(
                    f"Table {live.name!r}: rows were erased since a batch was looked up whose gradient now "
                    "comes. Erase between steps."
                )
        left = self._resolved.backward([grad for of_share in incoming for grad in of_share])
        for at, share in zip(mine, left.shares(mine), strict=True):
            share.rows.div_(self.ranks.size)
            own[at].parameter.waiting.shares.append(share._replace(finite=False))

    # -- rows to who keeps them ------------------------------------------------------------------

    def deliver(self, told: Tensor, rows: Tensor | None) -> list[tuple[Any, Tensor, Tensor | None]]:
        """Brings rows of one table to its keepers. Called by all ranks.

        Args:
            told: (ranks, shares) the `numbers` of each.
            rows: (n, dim) of the ids as they were given; None: only the ids travel.

        Returns:
            For each table of its own that this rank keeps: it, (m,) its ids, one rank's after the other's,
            and (m, columns) rows.
        """
        self._counts = told.tolist()
        by_rank = self._ids_to_keepers()
        ids = [torch.cat(of_share) for of_share in zip(*by_rank, strict=True)]
        weights: list[Any] = [None] * len(ids)
        if rows is not None:
            moved = self._moved[0]
            given = Rows(rows) if moved is None else Rows(rows, inverse_of(moved))
            shards = self._layout.shards
            forms = [Form(rows.dtype, shard.stored.width) for shard in shards]
            outgoing = [self._part_of(given, s) for s in range(len(shards))]
            weights = [torch.cat(some) for some in self._to_keepers("rows", outgoing, forms)]
        return [*zip(self._layout.own(), ids, weights, strict=True)]

    # -- messages --------------------------------------------------------------------------------

    def _part_of(self, rows: Rows, s: int) -> Rows:
        """Return the part of (n, dim) rows of its table that belongs to a shard."""
        shard = self._layout.shards[s]
        columns = None if shard.whole else shard.columns
        return rows.cut(self._begins[s], self._ends[s], columns)

    def _ids_to_keepers(self) -> list[Sequence[Tensor]]:
        """For each rank (m,) ids of each share of this one, as the share calls them."""
        layout, own = self._layout, self.ranks.rank
        outgoing = [self._own_ids(s) for s in range(len(layout.shards))]
        sizes = [8 * sum(outgoing[s].shape[0] for s in kept) for kept in layout.kept_by]
        messages = self.ranks.take([0 if k == own else size for k, size in enumerate(sizes)])
        for keeper, kept in enumerate(layout.kept_by):
            if keeper != own and sizes[keeper]:
                written: Any = messages[keeper].view(torch.int64)
                torch.cat([outgoing[s] for s in kept], out=written)
        mine = [[counts[s] for s in layout.mine] for counts in self._counts]
        coming = [0 if r == own else 8 * sum(counts) for r, counts in enumerate(mine)]
        received = self.ranks.send("ids", coming)
        found: list[Sequence[Tensor]] = []
        for rank, message in enumerate(received):
            if rank == own:
                found.append([outgoing[s] for s in layout.mine])
            else:
                there: Any = message.view(torch.int64)
                found.append(torch.split(there.clone(), mine[rank]))
        return found

    def _own_ids(self, s: int) -> Tensor:
        """(n,) ids that this rank asks for, as a shard calls them."""
        shard = self._layout.shards[s]
        ids, begin, end = self.asked[shard.table], self._begins[s], self._ends[s]
        if (begin, end) != (0, ids.shape[0]):
            ids = ids[begin:end]
        return shard.origin.own_ids(ids)

    def _to_keepers(
        self,
        what: str,
        outgoing: Sequence[Rows | None],
        forms: Sequence[Form],
        wanted: Collection[int] | None = None,
    ) -> list[list[Any]]:
        """For each share of this rank what each rank has for it, (m, width), which stays until the ranks next
        send something.

        Args:
            outgoing: (n, width) for each share; None: zeros.
            wanted: positions of tables; of others nothing travels, and comes. None: all.
        """
        own, every, shards = self.ranks.rank, range(self.ranks.size), self._layout.shards
        chosen = [
            [s for s in kept if wanted is None or shards[s].table in wanted]
            for kept in self._layout.kept_by
        ]

        def size(requester: int, some: Sequence[int]) -> int:
            counts = self._counts[requester]
            return sum(forms[s].size(counts[s]) for s in some)

        def pieces_of(message: Tensor, requester: int, some: Sequence[int]) -> Sequence[Tensor]:
            counts = self._counts[requester]
            return cut(message, [forms[s] for s in some], [counts[s] for s in some])

        sizes = [0 if k == own else size(own, chosen[k]) for k in every]
        for keeper, message in enumerate(self.ranks.take(sizes)):
            if keeper == own:
                continue
            for s, piece in zip(
                chosen[keeper], pieces_of(message, own, chosen[keeper]), strict=True
            ):
                some = outgoing[s]
                if some is None:
                    piece.zero_()
                else:
                    some.write(piece)
        coming = [0 if r == own else size(r, chosen[own]) for r in every]
        received = self.ranks.send(what, coming)
        found: dict[int, list[Any]] = {s: [None] * self.ranks.size for s in self._layout.mine}
        for source in every:
            if source != own:
                pieces = pieces_of(received[source], source, chosen[own])
                for s, piece in zip(chosen[own], pieces, strict=True):
                    found[s][source] = piece
        for s in chosen[own]:
            some, form = outgoing[s], forms[s]
            found[s][own] = (
                torch.zeros((self._counts[own][s], form.width), dtype=form.dtype)
                if some is None
                else some.made()
            )
        return [*found.values()]

    def _size(self, requester: int, some: Sequence[int]) -> int:
        """Return the bytes of a message with one row for each id that `requester` asks for."""
        counts, shards = self._counts[requester], self._layout.shards
        return sum(shards[s].stored.size(counts[s]) for s in some)

    def _cut(self, message: Tensor, requester: int, some: Sequence[int]) -> Sequence[Tensor]:
        """(count, width) of each of some shards."""
        counts, shards = self._counts[requester], self._layout.shards
        return cut(message, [shards[s].stored for s in some], [counts[s] for s in some])


def _first(columns: tuple[int, Tensor]) -> int:
    return columns[0]


def _bags(ids: Tensor) -> Bags:
    """One vector an id."""
    return Bags(ids, None, 1, ids.shape[0], None, ids.shape[0], None, False)
