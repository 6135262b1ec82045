"""The way of a batch across ranks: distinct ids to their keepers, rows back, and later gradients the same way.

Shapes: n distinct ids of a table that this rank asks for, m ids that all ranks ask this one for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.dist.ranks import PeerError, Ranks, bytes_of, numbers_in
from hotbed.dist.shares import Share
from hotbed.inputs.bags import Bags
from hotbed.table.place import Call

__all__ = ["Trip"]

Lookup = Callable[[Call], tuple[Any, list[Tensor]]]
"""Resolves a call and looks it up: what backward goes on with, and a (m, dim) tensor a feature."""


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
        self._routes = [  # positions in what is asked for
            torch.arange(len(ids)) if here is None else torch.nonzero(here).flatten()
            for ids, here in parts
        ]
        self._mine = [s for s, (_, share) in enumerate(self._shares) if share.rank == ranks.rank]
        self._resolved: Any = None
        self._counts = torch.empty(0)

    def take_slots(self, *, fresh: bool) -> None:
        """`fresh`: no other batch has slots."""
        self.first_slots = []
        for place, ids in zip(self.places, self.asked, strict=True):
            first = 0 if fresh else place.slots_taken
            self.first_slots.append(first)
            place.slots_taken = first + len(ids)

    def fetch(
        self, kind: str, lookup: Lookup, modes: Sequence[int], frozen: Sequence[int], training: bool
    ) -> list[Tensor]:
        """(n, dim) rows of each table, as they are stored. Called by all ranks.

        Args:
            kind: see `Ranks.agree`.
            modes: numbers in which the ranks must agree.
            frozen: positions of tables that take no new rows.
            training: whether new ids of the others get one.
        """
        told = self.ranks.agree(kind, [*modes, *map(len, self._routes)])
        for rank, numbers in enumerate(told[:, : len(modes)].tolist()):
            if numbers != list(modes):
                raise PeerError(
                    f"Rank {rank} looks up in another mode than rank {self.ranks.rank}: model.train() or "
                    "eval(), requires_grad of tables, and torch.no_grad() must be alike on all ranks."
                )
        self._counts = told[:, len(modes) :]
        bags = [_bags(ids) for ids in self._to_keepers("ids", self._ids, lambda _: torch.int64, 1)]
        owners = [self.places[self._shares[s][0]] for s in self._mine]
        rows: list[Tensor] = []
        if self._mine:
            live = [self._own(s) for s in self._mine]
            here = [at for at, s in enumerate(self._mine) if self._shares[s][0] in frozen]
            call = Call(live, range(len(live)), [t.name for t in live], bags, here, training)
            self._resolved, rows = lookup(call)
        stored = [row.to(place.spec.dtype) for row, place in zip(rows, owners, strict=True)]
        return self._to_requesters(stored)

    def give(self, grads: Sequence[Tensor | None], wanted: Sequence[int]) -> None:
        """Brings gradients to the keepers, who sum them. Called by all ranks.

        Args:
            grads: (n, dim) of the compute dtype for each table in `wanted`; None: zeros.
            wanted: positions of the tables of which a rank has a gradient.
        """
        outgoing = []
        for (t, share), route in zip(self._shares, self._routes, strict=True):
            grad = grads[t] if t in wanted else torch.empty(0, self.places[t].spec.dim)
            dtype = self.places[t].spec.compute_dtype
            if t not in wanted:
                outgoing.append(torch.empty((0, share.part.dim), dtype=dtype))
            elif grad is None:
                outgoing.append(torch.zeros((len(route), share.part.dim), dtype=dtype))
            else:
                outgoing.append(grad[route][:, share.part.columns].contiguous())
        incoming = self._to_keepers(
            "gradients", outgoing, lambda t: self.places[t].spec.compute_dtype, None, wanted
        )
        mine = [at for at, s in enumerate(self._mine) if self._shares[s][0] in wanted]
        if not mine:
            return
        left = self._resolved.backward(
            [grad if at in mine else None for at, grad in enumerate(incoming)]
        )
        for at, share in zip(mine, left.shares(mine), strict=True):
            share.rows.div_(self.ranks.size)
            live = self._own(self._mine[at])
            live.parameter.waiting.shares.append(share._replace(finite=False))

    # -- the two directions ----------------------------------------------------------------------

    def _own(self, s: int) -> Any:
        t, share = self._shares[s]
        return self.places[t].own[share]

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
            torch.cat([_NOTHING, *(bytes_of(outgoing[s]) for s in self._kept_by(rank))])
            for rank in range(self.ranks.size)
        ]
        sizes = [[nbytes(source, s) for s in self._mine] for source in range(self.ranks.size)]
        incoming = self.ranks.exchange(what, parts, list(map(sum, sizes)))
        pieces = [
            torch.split(block, own) if own else () for block, own in zip(incoming, sizes, strict=True)
        ]
        found = []
        for at, s in enumerate(self._mine):
            t, share = self._shares[s]
            raw = numbers_in(torch.cat([of_rank[at] for of_rank in pieces]), dtype_of(t))
            found.append(raw if width is not None else raw.view(-1, share.part.dim))
        return found

    def _to_requesters(self, rows: Sequence[Tensor]) -> list[Tensor]:
        cut = [
            torch.split(block, self._counts[:, s].tolist())
            for s, block in zip(self._mine, rows, strict=True)
        ]
        parts = [
            torch.cat([_NOTHING, *(bytes_of(block[rank]) for block in cut)])
            for rank in range(self.ranks.size)
        ]
        sizes = [
            [
                len(self._routes[s]) * share.part.dim * self.places[t].spec.dtype.itemsize
                for s, (t, share) in self._of(rank)
            ]
            for rank in range(self.ranks.size)
        ]
        incoming = self.ranks.exchange("rows", parts, list(map(sum, sizes)))
        found = [
            torch.empty((len(ids), place.spec.dim), dtype=place.spec.dtype)
            for ids, place in zip(self.asked, self.places, strict=True)
        ]
        for rank, (block, own) in enumerate(zip(incoming, sizes, strict=True)):
            for (s, (t, share)), raw in zip(self._of(rank), torch.split(block, own), strict=True):
                table = numbers_in(raw, self.places[t].spec.dtype)
                found[t][self._routes[s], share.part.columns] = table.view(-1, share.part.dim)
        return found

    def _of(self, rank: int) -> Iterator[tuple[int, tuple[int, Share]]]:
        return ((s, one) for s, one in enumerate(self._shares) if one[1].rank == rank)

    def _kept_by(self, rank: int) -> Iterator[int]:
        return (s for s, _ in self._of(rank))


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _bags(ids: Tensor) -> Bags:
    """One vector an id."""
    offsets = torch.tensor([0, len(ids)])
    return Bags(ids, offsets, 0, 1, None, 1, None, True)

