"""Where the shards of some tables lie in messages: found out once, used by every batch of these tables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from hotbed.dist.rows import Form
from hotbed.tables import Origin

__all__ = ["Layout", "ShardInfo"]


class ShardInfo(NamedTuple):
    """One rank's shard of a table, as a batch needs it."""

    table: int
    """Position among the tables."""
    rank: int
    replica: bool
    columns: slice
    whole: bool
    """True if it has all columns."""
    origin: Origin
    stored: Form
    """Form of its rows on the wire."""
    computed: Form
    """Form of their gradients on the wire."""
    own: weakref.ref[Any] | None
    """The live table, where this rank keeps it."""


class Layout:
    """Shards of some tables, the same on all ranks.

    Attributes:
        shards: of the first table in the order of their ranks, then of the next.
        kept_by: positions of the shards of each rank.
        mine: of this rank.
        dealings: how rows of each table are dealt out to ranks; None: they are not.
    """

    def __init__(self, rank: int, size: int, places: Sequence[Any]) -> None:
        self.shards: list[ShardInfo] = []
        self.dealings = [place.kind.dealing(place.spec) for place in places]
        for t, place in enumerate(places):
            spec = place.spec
            for share in place.shares:
                part, live = share.part, place.own.get(share)
                self.shards.append(
                    ShardInfo(
                        t,
                        share.rank,
                        share.replica,
                        part.columns,
                        part.dim == spec.dim,
                        part.origin,
                        Form(spec.dtype, part.dim),
                        Form(spec.compute_dtype, part.dim),
                        None if live is None else weakref.ref(live),
                    )
                )
        self.kept_by: list[list[int]] = [[] for _ in range(size)]
        for s, shard in enumerate(self.shards):
            self.kept_by[shard.rank].append(s)
        self.mine = self.kept_by[rank]

    def own(self) -> list[Any]:
        """Live tables of `mine`."""
        found = []
        for s in self.mine:
            live = self.shards[s].own
            assert live is not None
            found.append(live())
        return found
