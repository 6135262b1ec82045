"""A batch across ranks: distinct ids to their keepers, rows back, and later gradients the same way.

Shapes: n distinct ids of a table that this rank asks for, m ids that a rank asks this one for.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.dist.ranks import Ranks
from hotbed.dist.rows import Form, Rows, by_keeper, inverse_of
from hotbed.dist.shares import Share
from hotbed.dist.wire import block
from hotbed.errors import TableError
from hotbed.inputs.bags import Bags
from hotbed.resolve.lookup import looked_up
from hotbed.table.place import Call

__all__ = ["Trip"]


class _Part(NamedTuple):
    """What one rank keeps of a table."""

    table: int
    share: Share
    asked: slice
    """Which of the ids that this rank asks for."""


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
        self._parts: list[_Part] = []
        for t, (place, some) in enumerate(zip(places, ids, strict=True)):
            asked, moved, slices = by_keeper(place, some)
            self.asked.append(asked)
            self._moved.append(moved)
            self._parts += map(_Part, [t] * len(slices), place.shares, slices)
        self._kept_by: list[list[int]] = [[] for _ in range(ranks.size)]
        for s, part in enumerate(self._parts):
            self._kept_by[part.share.rank].append(s)
        self._mine = self._kept_by[ranks.rank]
        self._resolved: Any = None
        self._generations: list[int] = []
        self._counts: list[list[int]] = []

    @property
    def numbers(self) -> list[int]:
        """How many ids this rank has for each share."""
        return [part.asked.stop - part.asked.start for part in self._parts]

    def asked_of(self, s: int) -> slice:
        """Positions in `asked` of the ids that share `s` of the only table keeps."""
        return self._parts[s].asked

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
            place.slots_taken = first + len(ids)
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
        forms = [Form(self.places[p.table].spec.dtype, p.share.part.dim) for p in self._parts]
        own, every = self.ranks.rank, range(self.ranks.size)
        answered = [[s for s in self._mine if self._answers(s, rank)] for rank in every]
        sizes = [self._size(rank, answered[rank], forms) for rank in every]
        messages = self.ranks.take([0 if rank == own else sizes[rank] for rank in every])
        messages[own] = block(sizes[own])
        places: dict[tuple[int, int], Tensor] = {}
        for rank in every:
            pieces = self._cut(messages[rank], rank, answered[rank], forms)
            places |= {(s, rank): piece for s, piece in zip(answered[rank], pieces, strict=True)}
        fault: Exception | None = None
        try:
            self._look_up(ids, places, frozen, training)
        except Exception as error:
            fault = error
        asked = [[s for s in self._kept_by[rank] if self._answers(s, own)] for rank in every]
        coming = [0 if r == own else self._size(own, asked[r], forms) for r in every]
        received = self.ranks.send("rows", coming, fault)
        received[own] = messages[own]
        found: list[list[Tensor]] = [[] for _ in self.places]
        cut: dict[int, list[tuple[int, Tensor]]] = {}
        for rank in every:
            pieces = self._cut(received[rank], own, asked[rank], forms)
            for s, piece in zip(asked[rank], pieces, strict=True):
                t, share, _ = self._parts[s]
                if share.part.dim == self.places[t].spec.dim:
                    found[t].append(piece)
                else:
                    cut.setdefault(t, []).append((share.part.columns.start, piece))
        for t, columns in cut.items():
            found[t].append(torch.cat([piece for _, piece in sorted(columns, key=_first)], 1))
        return found

    def _look_up(
        self,
        ids: Sequence[Sequence[Tensor]],
        places: dict[tuple[int, int], Tensor],
        frozen: Sequence[int],
        training: bool,
    ) -> None:
        """What this rank keeps of the rows. `places`: where those of a share go that a rank is to have."""
        live = [self._own(s) for s in self._mine]
        if not live:
            return
        table_of: list[int] = []
        bags: list[Bags] = []
        vectors: list[Tensor] = []
        converted: list[tuple[Tensor, Tensor]] = []
        for at, s in enumerate(self._mine):
            spec = live[at].spec
            for rank, of_rank in enumerate(ids[at]):
                place = places.get((s, rank))
                if place is None or spec.compute_dtype != spec.dtype:
                    wide = block(len(of_rank) * spec.dim * spec.compute_dtype.itemsize)
                    wide = wide.view(spec.compute_dtype).view(-1, spec.dim)
                    if place is not None:
                        converted.append((place, wide))
                    place = wide
                table_of.append(at)
                bags.append(_bags(of_rank))
                vectors.append(place)
        never = set(frozen)
        here = [at for at, s in enumerate(self._mine) if self._parts[s].table in never]
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
        self._look_up(self._ids_to_keepers(), {}, [], False)

    def _answers(self, s: int, requester: int) -> bool:
        """Whether a share sends rows to a rank. One that keeps all itself only sends ids, and gradients."""
        share = self._parts[s].share
        return not share.replica or share.rank == requester

    # -- gradients to keepers --------------------------------------------------------------------

    def give(self, grads: Sequence[Rows | None], wanted: Sequence[int]) -> None:
        """Brings gradients to the keepers, who sum them. Called by all ranks.

        Args:
            grads: (n, dim) of the compute dtype for each table in `wanted`; None: zeros.
            wanted: positions of the tables of which a rank has a gradient.
        """
        forms = [
            Form(self.places[p.table].spec.compute_dtype, p.share.part.dim) for p in self._parts
        ]
        outgoing = [self._part_of(grads[part.table], part) for part in self._parts]
        incoming = self._to_keepers("gradients", outgoing, forms, wanted)
        mine = [at for at, s in enumerate(self._mine) if self._parts[s].table in wanted]
        if not mine:
            return
        for live, generation in zip(map(self._own, self._mine), self._generations, strict=True):
            if live.generation != generation:
                raise TableError(
                    f"Table {live.name!r}: rows were erased since a batch was looked up whose gradient now "
                    "comes. Erase between steps."
                )
        left = self._resolved.backward([grad for of_share in incoming for grad in of_share])
        for at, share in zip(mine, left.shares(mine), strict=True):
            share.rows.div_(self.ranks.size)
            live = self._own(self._mine[at])
            live.parameter.waiting.shares.append(share._replace(finite=False))

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
        ids = [torch.cat(list(of_share)) for of_share in self._ids_to_keepers()]
        weights: list[Any] = [None] * len(ids)
        if rows is not None:
            moved = self._moved[0]
            given = Rows(rows) if moved is None else Rows(rows, inverse_of(moved))
            forms = [Form(rows.dtype, part.share.part.dim) for part in self._parts]
            outgoing = [self._part_of(given, part) for part in self._parts]
            weights = [torch.cat(some) for some in self._to_keepers("rows", outgoing, forms)]
        return [(self._own(s), i, w) for s, i, w in zip(self._mine, ids, weights, strict=True)]

    # -- messages --------------------------------------------------------------------------------

    def _own(self, s: int) -> Any:
        t, share, _ = self._parts[s]
        return self.places[t].own[share]

    @staticmethod
    def _part_of(rows: Rows | None, part: _Part) -> Rows | None:
        """Of (n, dim) rows of its table what a part is to have."""
        return None if rows is None else rows.cut(part.asked, part.share.part.columns)

    def _ids_to_keepers(self) -> list[list[Tensor]]:
        """For each share of this rank (m,) ids of each rank, as the share calls them."""
        outgoing = [
            Rows(part.share.part.origin.own_ids(self.asked[part.table][part.asked])[:, None])
            for part in self._parts
        ]
        forms = [Form(torch.int64, 1)] * len(outgoing)
        found = self._to_keepers("ids", outgoing, forms)
        return [[ids.flatten().clone() for ids in of_share] for of_share in found]

    def _to_keepers(
        self,
        what: str,
        outgoing: Sequence[Rows | None],
        forms: Sequence[Form],
        wanted: Sequence[int] | None = None,
    ) -> list[list[Any]]:
        """For each share of this rank what each rank has for it, (m, width), which stays until the ranks next
        send something.

        Args:
            outgoing: (n, width) for each share; None: zeros.
            wanted: positions of tables; of others nothing travels, and comes. None: all.
        """
        own, every = self.ranks.rank, range(self.ranks.size)
        chosen = [
            [s for s in kept if wanted is None or self._parts[s].table in wanted]
            for kept in self._kept_by
        ]
        sizes = [0 if k == own else self._size(own, chosen[k], forms) for k in every]
        for keeper, message in enumerate(self.ranks.take(sizes)):
            if keeper == own:
                continue
            pieces = self._cut(message, own, chosen[keeper], forms)
            for s, piece in zip(chosen[keeper], pieces, strict=True):
                some = outgoing[s]
                if some is None:
                    piece.zero_()
                else:
                    some.write(piece)
        coming = [0 if r == own else self._size(r, chosen[own], forms) for r in every]
        received = self.ranks.send(what, coming)
        found: dict[int, list[Any]] = {s: [None] * self.ranks.size for s in self._mine}
        for source in every:
            if source == own:
                continue
            pieces = self._cut(received[source], source, chosen[own], forms)
            for s, piece in zip(chosen[own], pieces, strict=True):
                found[s][source] = piece
        for s in chosen[own]:
            some = outgoing[s]
            form = forms[s]
            found[s][own] = (
                torch.zeros((self._counts[own][s], form.width), dtype=form.dtype)
                if some is None
                else some.made()
            )
        return [found[s] for s in self._mine]

    def _size(self, requester: int, parts: Sequence[int], forms: Sequence[Form]) -> int:
        """Of a message that has, or is to have, something for each id that one asks for."""
        counts = self._counts[requester]
        return sum(forms[s].size(counts[s]) for s in parts)

    def _cut(
        self, message: Tensor, requester: int, parts: Sequence[int], forms: Sequence[Form]
    ) -> list[Tensor]:
        """(count, width) of each of some parts."""
        counts, begin = self._counts[requester], 0
        found = []
        for s in parts:
            found.append(forms[s].of(message, begin, counts[s]))
            begin += forms[s].size(counts[s])
        return found


def _first(columns: tuple[int, Tensor]) -> int:
    return columns[0]


def _bags(ids: Tensor) -> Bags:
    """One vector an id."""
    offsets = torch.tensor([0, len(ids)])
    return Bags(ids, offsets, 0, 1, None, 1, None, True)
