"""Shards: the parts of a table that ranks own."""

from __future__ import annotations

from typing import NamedTuple

from hotbed.dist.row_codecs import Codecs
from hotbed.sharding import Sharding
from hotbed.table.live import LiveTable
from hotbed.table.place import Place
from hotbed.tables import Table

__all__ = ["Shard", "ShardedPlace", "TableOnRanks"]


class Shard(NamedTuple):
    """A part of a table, and the rank that keeps it."""

    rank: int
    part: Table
    replica: bool = False
    """Whether every rank keeps the same."""
    owner: int = 0
    """Where rows are split: whose they are, of the table's owners. An owner is a rank, or several, of which
    each has other columns."""


class ShardedPlace(Place):
    """Place of a table that ranks share, as exchanges see it; `hotbed.dist.place.Sharded` is one.

    Attributes:
        number: of the table among those that the ranks share.
        kind: how it is cut.
        shards: all of them, in the order of their ranks.
        own: tables of their own with the rows that this rank keeps.
        owners: among which rows are split; 1: they are not.
        codecs: how its rows and their gradients travel.
        bag_parts: the same of the ids of a bag; 0: owners pool no bags of this table.
        by_machine: True if ids of the ranks of a machine are brought together before they cross to another.
    """

    number: int
    kind: Sharding
    shards: list[Shard]
    own: dict[Shard, LiveTable]
    owners: int
    codecs: Codecs
    bag_parts: int
    by_machine: bool


class TableOnRanks(LiveTable):
    """Type of a live table that ranks share. `hotbed.distribute` gives a `LiveTable` such a place."""

    place: ShardedPlace
