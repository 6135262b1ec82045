"""Where the shards of some tables lie in messages: found out once, used by every batch of these tables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from hotbed import _core
from hotbed.dist.named_owners import NamedOwners
from hotbed.dist.row_codecs import Codecs
from hotbed.dist.shards import Shard, ShardedPlace
from hotbed.table.live import LiveTable
from hotbed.tables import CORE_DTYPES, Table

__all__ = ["LaidShard", "LaidTable", "Layout"]

_MOST_KEPT = 2
"""Rows of batches that are gone, kept for those to come."""


class LaidShard(NamedTuple):
    """A shard in messages."""

    shard: Shard
    """Its rank is that among the ranks of the layout."""
    first: int
    """First id; id i of the shard is the table's ``first + stride * i``."""
    stride: int
    column: int
    """First of its columns in the table."""
    live: LiveTable | None
    """It, where this rank keeps it."""


class LaidTable(NamedTuple):
    """A table, or a feature of it whose bags its owners pool, in messages."""

    number: int
    """Of the table among those of the layout's ranks."""
    spec: Table
    owner_rule: _core.OwnerRule | None
    codecs: Codecs
    shards: list[LaidShard]

    @classmethod
    def of(cls, place: ShardedPlace) -> LaidTable:
        """Return a table that ranks share, as all of them see it."""
        shards = []
        for shard in place.shards:
            origin, column = shard.part.origin, shard.part.columns.start
            live = place.own.get(shard)
            shards.append(LaidShard(shard, origin.first, origin.stride, column, live))
        rule = place.kind.owner_rule(place.spec)
        return cls(place.number, place.spec, rule, place.codecs, shards)


class Layout:
    """Shards of some tables, the same on all ranks that exchange them. A table can be in it several times,
    once for each feature whose bags its owners pool.

    Attributes:
        rank: of this process among `size`; gradients are divided by `trainers`, the ranks with batches.
        members: which of all ranks these are; None: all. `suffix`: of the names of bytes among them.
        core: computes the sizes and the contents of messages. Its tables are all that was given.
        table_numbers: of the tables among those that the ranks share, each once.
        position: of each table among these, by its number.
        tables: for each of the core's tables, its position.
        shards: position among the core's tables, and description of the table, of each, in the core's order.
        own: the live tables of the shards that this rank owns, each once.
        own_tables: position of the table of each of these.
        table_of: for each feature of `look_up_owned`, position in `own` of the shard that it reads. A feature
            is what one rank asks of one shard: shard 0 for each rank, then shard 1, as `Requests.ids_here`.
        names: of the tables of these features, for errors.
        named_owners: those of the tables whose kind of sharding names the owner of each id.
        row_codecs, gradient_codecs: of each of the core's tables.
        stored: True if all of these rows, and if all of these gradients, travel as the core has them.
        can_fail: True if codecs of rows can fail to decode, of a table that any rank exchanges beside these.
        by_machine: True if some of these tables are, see `ShardedPlace`.
        fetched: rows of batches that are gone, for those to come.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        trainers: int,
        laid: Sequence[LaidTable],
        members: Sequence[int] | None = None,
        suffix: str = "",
    ) -> None:
        tables, shards, own_positions = [], [], dict[LiveTable, int]()
        self.rank, self.size, self.trainers = rank, size, trainers
        self.members, self.suffix = members, suffix
        self.table_numbers = tuple(dict.fromkeys(table.number for table in laid))
        self.position = {number: t for t, number in enumerate(self.table_numbers)}
        self.tables = [self.position[table.number] for table in laid]
        self.table_of: list[int] = []
        self.names: list[str] = []
        self.own: list[weakref.ref[LiveTable]] = []
        self.own_tables: list[int] = []
        self.shards: list[tuple[int, Shard, Table]] = []
        self.named_owners: list[NamedOwners] = []
        self.row_codecs = [table.codecs.rows for table in laid]
        self.gradient_codecs = [table.codecs.gradients for table in laid]
        self.stored = tuple(
            all(codec.is_stored for codec in codecs)
            for codecs in (self.row_codecs, self.gradient_codecs)
        )
        self.by_machine = False
        self.can_fail = any(codec.can_fail for codec in self.row_codecs)
        for t, (_, spec, owner_rule, _, of_table) in enumerate(laid):
            dtype = CORE_DTYPES[spec.dtype]
            tables.append((spec.name, spec.dim, dtype, owner_rule, spec.padding_idx))
            for shard, first, stride, column, live in of_table:
                where = first, stride, column, shard.part.dim, shard.owner
                shards.append((t, shard.rank, shard.replica, *where))
                self.shards.append((t, shard, spec))
                if shard.rank == rank and live is not None:
                    if live not in own_positions:
                        own_positions[live] = len(self.own)
                        self.own_tables.append(self.tables[t])
                        self.own.append(weakref.ref(live))
                    self.table_of += [own_positions[live]] * size
                    self.names += [spec.name] * size
        self.core = _core.ExchangeLayout.make(rank, size, tables, shards, trainers)
        self.fetched: list[_core.FetchedRows] = []

    def give_back(self, rows: _core.FetchedRows) -> None:
        """Keep the memory of rows that nobody reads any more."""
        if len(self.fetched) < _MOST_KEPT:
            self.fetched.append(rows)

    @classmethod
    def of_all(cls, rank: int, size: int, trainers: int, places: Sequence[ShardedPlace]) -> Layout:
        """Return that of tables which all ranks exchange with each other."""
        made = cls(rank, size, trainers, [LaidTable.of(place) for place in places])
        made.by_machine = any(place.by_machine for place in places)
        for t, place in enumerate(places):
            if place.kind.owner_rule(place.spec) is _core.OwnerRule.given:
                owners = NamedOwners(t, place.kind, place.spec, place.shards, size)
                made.named_owners.append(owners)
        return made
