"""Where the shards of some tables lie in messages: found out once, used by every batch of these tables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from hotbed import _core
from hotbed.tables import CORE_DTYPES

__all__ = ["Layout"]


class Layout:
    """Shards of some tables, the same on all ranks.

    Attributes:
        core: computes the sizes and the contents of messages.
        numbers: of the tables among those that the ranks share.
        position: of each table among these, by its number.
        own_tables: position of the table of each shard that this rank owns.
        table_of: position of the shard of each feature at its owner; what a rank asks of one is one.
        names: of these features, for errors.
        fetched: rows of batches that are gone, for those to come.
    """

    def __init__(self, rank: int, size: int, places: Sequence[Any]) -> None:
        tables, shards, own, names = [], [], [], []
        self.own_tables: list[int] = []
        for t, place in enumerate(places):
            spec = place.spec
            dealing, padding = place.kind.dealing(spec), spec.padding_idx
            tables.append((spec.name, spec.dim, CORE_DTYPES[spec.dtype], dealing, padding))
            for share in place.shares:
                part = share.part
                first, stride, column = part.origin.first, part.origin.stride, part.columns.start
                shards.append((t, share.rank, share.replica, first, stride, column, part.dim))
                if share.rank == rank:
                    self.own_tables.append(t)
                    own.append(weakref.ref(place.own[share]))
                    names += [spec.name] * size
        self.core = _core.ExchangeLayout.make(rank, size, tables, shards)
        self.numbers = tuple(place.number for place in places)
        self.position = {number: t for t, number in enumerate(self.numbers)}
        self.table_of = [at for at in range(len(own)) for _ in range(size)]
        self.names: list[str] = names
        self.fetched: list[_core.FetchedRows] = []
        self._own = own

    def own(self) -> list[Any]:
        """The live tables of the shards that this rank owns."""
        return [live() for live in self._own]
