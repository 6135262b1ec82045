"""Where the shards of some tables lie in messages: found out once, used by every batch of these tables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from hotbed import _core
from hotbed.dist.named_owners import NamedOwners
from hotbed.dist.shards import Shard, ShardedPlace
from hotbed.table.live import LiveTable
from hotbed.tables import CORE_DTYPES, Table

__all__ = ["Layout"]


class Layout:
    """Shards of some tables, the same on all ranks. A table can be in it several times, once for each feature
    whose bags its owners pool.

    Attributes:
        rank: of this process among `size`; of these, so many are `trainers`, which have batches.
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
        fetched: rows of batches that are gone, for those to come.
    """

    def __init__(self, rank: int, size: int, trainers: int, places: Sequence[ShardedPlace]) -> None:
        tables, shards, own_positions = [], [], dict[LiveTable, int]()
        self.rank, self.size, self.trainers = rank, size, trainers
        self.table_numbers = tuple(dict.fromkeys(place.number for place in places))
        self.position = {number: t for t, number in enumerate(self.table_numbers)}
        self.tables = [self.position[place.number] for place in places]
        self.table_of: list[int] = []
        self.names: list[str] = []
        self.own: list[weakref.ref[LiveTable]] = []
        self.own_tables: list[int] = []
        self.shards: list[tuple[int, Shard, Table]] = []
        self.named_owners: list[NamedOwners] = []
        self.row_codecs = [place.codecs.rows for place in places]
        self.gradient_codecs = [place.codecs.gradients for place in places]
        self.stored = tuple(
            all(codec.is_stored for codec in codecs)
            for codecs in (self.row_codecs, self.gradient_codecs)
        )
        for t, place in enumerate(places):
            spec = place.spec
            owner_rule, padding = place.kind.owner_rule(spec), spec.padding_idx
            tables.append((spec.name, spec.dim, CORE_DTYPES[spec.dtype], owner_rule, padding))
            if owner_rule is _core.OwnerRule.given:
                self.named_owners.append(NamedOwners(t, place.kind, spec, place.shards, size))
            for shard in place.shards:
                part = shard.part
                first, stride, column = part.origin.first, part.origin.stride, part.columns.start
                where = first, stride, column, part.dim, shard.owner
                shards.append((t, shard.rank, shard.replica, *where))
                self.shards.append((t, shard, spec))
                if shard.rank == rank:
                    live = place.own[shard]
                    if live not in own_positions:
                        own_positions[live] = len(self.own)
                        self.own_tables.append(self.tables[t])
                        self.own.append(weakref.ref(live))
                    self.table_of += [own_positions[live]] * size
                    self.names += [spec.name] * size
        self.core = _core.ExchangeLayout.make(rank, size, tables, shards, trainers)
        self.fetched: list[_core.FetchedRows] = []
