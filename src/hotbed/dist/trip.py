"""The way of a batch across ranks: distinct ids to their keepers, rows back, and later gradients the same way.

Shapes: n distinct ids of a table that this rank asks for, m ids that all ranks ask this one for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.dist.raw import bytes_of, numbers_in
from hotbed.dist.ranks import Ranks
from hotbed.dist.shares import Share
from hotbed.errors import HotbedError, TableError
from hotbed.inputs.bags import Bags
from hotbed.resolve.lookup import looked_up
from hotbed.table.place import Call

__all__ = ["Trip"]


class Trip:
    """One batch of tables of the same ranks.

    Attributes:
        places: of the tables.
        asked: (n,) int64 distinct ids of each.
        first_slots: of the n slots that they have in their places, if a gradient may come.
    """

    first_slots: list[int]

    def __init__(self, ranks: Ranks, places: Sequence[Any], asked: Sequence[Tensor]) -> None:
        self.ranks, self.places, self.asked = ranks, places, asked
        self._shares: list[tuple[int, Share]] = [
            (t, share) for t, place in enumerate(places) for share in place.shares
        ]
        parts = [share.part.origin.ids_in_part(asked[t]) for t, share in self._shares]
        self._ids = [ids for ids, _ in parts]
        # Positions in what is asked for; None: all of it.
        self._routes = [None if here is None else torch.nonzero(here).flatten() for _, here in parts]
        self._mine = [s for s, (_, share) in enumerate(self._shares) if share.rank == ranks.rank]
        self._resolved: Any = None
        self._generations: list[int] = []
        self._counts = torch.empty(0)

    @property
    def numbers(self) -> list[int]:
        """How many ids this rank has for each share."""
        return [len(ids) for ids in self._ids]

    def wait(self, batch: Any) -> None:
        """Stays for the gradients of a batch; None: this rank has none."""
        fresh = not self.ranks.waiting  # no other batch has slots
        self.first_slots = []
        for place, ids in zip(self.places, self.asked, strict=True):
            first = 0 if fresh else place.slots_taken
            self.first_slots.append(first)
            place.slots_taken = first + len(ids)
        self.ranks.wait_for(batch, self)

    # -- rows to who asks ------------------------------------------------------------------------

    def fetch(self, told: Tensor, frozen: Sequence[int], training: bool) -> list[Tensor]:
        """(n, dim) rows of each table, as they are stored. Called by all ranks.

        Args:
            told: (ranks, shares) the `numbers` of each.
            frozen: positions of tables that take no new rows.
            training: whether new ids of the others get one.
        """
        self._counts = told
        bags = [_bags(ids) for ids in self._to_keepers("ids", self._ids, lambda _: torch.int64, 1)]
        live = [self._own(s) for s in self._mine]
        rows: list[Tensor] = []
        fault: HotbedError | None = None
        if live:
            here = [at for at, s in enumerate(self._mine) if self._shares[s][0] in frozen]
            call = Call(live, range(len(live)), [t.name for t in live], bags, here, training)
            try:
                self._resolved, rows = looked_up(call)
                self._generations = [table.generation for table in live]
            except HotbedError as error:
                fault = error
                rows = [
                    torch.empty((len(b.ids), t.spec.dim)) for b, t in zip(bags, live, strict=True)
                ]
        stored = [row.to(t.spec.dtype) for row, t in zip(rows, live, strict=True)]
        return self._to_requesters(stored, fault)

    # -- gradients to keepers --------------------------------------------------------------------

    def give(self, grads: Sequence[Tensor | None], wanted: Sequence[int]) -> None:
        """Brings gradients to the keepers, who sum them. Called by all ranks.

        Args:
            grads: (n, dim) of the compute dtype for each table in `wanted`; None: zeros.
            wanted: positions of the tables of which a rank has a gradient.
        """
        outgoing = []
        for s, (t, share) in enumerate(self._shares):
            dtype, count = self.places[t].spec.compute_dtype, len(self._ids[s]) if t in wanted else 0
            grad = grads[t] if count else None
            if grad is None:
                outgoing.append(torch.zeros((count, share.part.dim), dtype=dtype))
            else:
                outgoing.append(self._cut(s, grad))
        incoming = self._to_keepers(
            "gradients", outgoing, lambda t: self.places[t].spec.compute_dtype, None, wanted
        )
        mine = [at for at, s in enumerate(self._mine) if self._shares[s][0] in wanted]
        if not mine:
            return
        for live, generation in zip(map(self._own, self._mine), self._generations, strict=True):
            if live.generation != generation:
                raise TableError(
                    f"Table {live.name!r}: rows were erased since a batch was looked up whose gradient now "
                    "comes. Erase between steps."
                )
        left = self._resolved.backward(
            [grad if at in mine else None for at, grad in enumerate(incoming)]
        )
        for at, share in zip(mine, left.shares(mine), strict=True):
            share.rows.div_(self.ranks.size)
            live = self._own(self._mine[at])
            live.parameter.waiting.shares.append(share._replace(finite=False))

    # -- rows to who keeps them ------------------------------------------------------------------

    def deliver(self, told: Tensor, rows: Tensor | None) -> list[tuple[Any, Tensor, Tensor | None]]:
        """Brings rows of one table to its keepers. Called by all ranks.

        Args:
            told: (ranks, shares) the `numbers` of each.
            rows: (n, dim) by `asked`; None: only the ids travel.

        Returns:
            For each table of its own that this rank keeps: it, (m,) its ids, one rank's after the other's,
            and (m, columns) rows.
        """
        self._counts = told
        ids = self._to_keepers("ids", self._ids, lambda _: torch.int64, 1)
        weights: list[Any] = [None] * len(ids)
        if rows is not None:
            outgoing = [self._cut(s, rows) for s in range(len(self._shares))]
            weights = self._to_keepers("rows", outgoing, lambda _: rows.dtype, None)
        return [(self._own(s), i, w) for s, i, w in zip(self._mine, ids, weights, strict=True)]

    # -- the two directions ----------------------------------------------------------------------

    def _own(self, s: int) -> Any:
        t, share = self._shares[s]
        return self.places[t].own[share]

    def _cut(self, s: int, rows: Tensor) -> Tensor:
        """Of (n, dim) rows of its table what a share is to have."""
        (_, share), route = self._shares[s], self._routes[s]
        some = rows if route is None else rows.index_select(0, route)
        return some if share.part.dim == some.shape[1] else some[:, share.part.columns].contiguous()

    def _to_keepers(
        self,
        what: str,
        outgoing: Sequence[Tensor],
        dtype_of: Callable[[int], torch.dtype],
        width: int | None,
        wanted: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """For each share of this rank what all ranks have for it, one rank after the other: (m,), or
        (m, columns) if `width` is None."""

        def nbytes(source: int, s: int) -> int:
            t, share = self._shares[s]
            if wanted is not None and t not in wanted:
                return 0
            columns = share.part.dim if width is None else width
            return int(self._counts[source, s]) * columns * dtype_of(t).itemsize

        parts = [
            [bytes_of(outgoing[s]) for s in self._kept_by(rank)] for rank in range(self.ranks.size)
        ]
        sizes = [[nbytes(source, s) for s in self._mine] for source in range(self.ranks.size)]
        incoming = self.ranks.exchange(what, parts, list(map(sum, sizes)))
        pieces = [
            torch.split(block, own) if own else ()
            for block, own in zip(incoming, sizes, strict=True)
        ]
        found = []
        for at, s in enumerate(self._mine):
            t, share = self._shares[s]
            raw = numbers_in(_joined([of_rank[at] for of_rank in pieces]), dtype_of(t))
            found.append(raw if width is not None else raw.view(-1, share.part.dim))
        return found

    def _to_requesters(self, rows: Sequence[Tensor], fault: HotbedError | None) -> list[Tensor]:
        cut = {
            s: torch.split(block, self._counts[:, s].tolist())
            for s, block in zip(self._mine, rows, strict=True)
        }
        own = self.ranks.rank
        parts = [
            [bytes_of(cut[s][rank]) for s in cut if self._answers(s, rank)]
            for rank in range(self.ranks.size)
        ]
        sizes = [
            [
                len(self._ids[s]) * share.part.dim * self.places[t].spec.dtype.itemsize
                for s, (t, share) in self._of(rank)
                if self._answers(s, own)
            ]
            for rank in range(self.ranks.size)
        ]
        incoming = self.ranks.exchange("rows", parts, list(map(sum, sizes)), fault)
        found: list[Any] = [None] * len(self.places)
        for rank, (block, of_rank) in enumerate(zip(incoming, sizes, strict=True)):
            answers = [one for one in self._of(rank) if self._answers(one[0], own)]
            for (s, (t, share)), raw in zip(answers, torch.split(block, of_rank), strict=True):
                spec, route = self.places[t].spec, self._routes[s]
                rows_of_share = numbers_in(raw, spec.dtype).view(-1, share.part.dim)
                if route is None and share.part.dim == spec.dim:
                    found[t] = rows_of_share
                    continue
                if found[t] is None:
                    found[t] = torch.empty((len(self.asked[t]), spec.dim), dtype=spec.dtype)
                found[t][slice(None) if route is None else route, share.part.columns] = rows_of_share
        return found

    def _answers(self, s: int, requester: int) -> bool:
        """Whether a share sends rows to a rank. One that keeps all itself only sends ids, and gradients."""
        share = self._shares[s][1]
        return not share.replica or share.rank == requester

    def _of(self, rank: int) -> Iterator[tuple[int, tuple[int, Share]]]:
        return ((s, one) for s, one in enumerate(self._shares) if one[1].rank == rank)

    def _kept_by(self, rank: int) -> Iterator[int]:
        return (s for s, _ in self._of(rank))


def _joined(pieces: list[Tensor]) -> Tensor:
    there = [piece for piece in pieces if len(piece)]
    return torch.cat(there) if len(there) > 1 else (there or pieces)[0]


def _bags(ids: Tensor) -> Bags:
    """One vector an id."""
    offsets = torch.tensor([0, len(ids)])
    return Bags(ids, offsets, 0, 1, None, 1, None, True)
