"""How a table is cut into shards, one for each rank: the kinds, as values that know no table.

A kind says which rows and columns a rank keeps and which rank keeps an id. One that does not name its
ranks yet (``TableWise()``, ``ColumnWise()``) is a wish, which `hotbed.plan` fulfils.
"""

from hotbed.sharding.column import ColumnWise, even_widths
from hotbed.sharding.grid import GridWise
from hotbed.sharding.kind import Extent, Kept, Shape, Sharding
from hotbed.sharding.kinds import KINDS, sharding_of
from hotbed.sharding.owners import (
    MOST_RANKS,
    checked_local_size,
    checked_world_size,
    hashed_owner,
    modulo_owner,
)
from hotbed.sharding.row import RowWise
from hotbed.sharding.whole import Replicated, TableWise

__all__ = [
    "KINDS",
    "MOST_RANKS",
    "ColumnWise",
    "Extent",
    "GridWise",
    "Kept",
    "Replicated",
    "RowWise",
    "Shape",
    "Sharding",
    "TableWise",
    "checked_local_size",
    "checked_world_size",
    "even_widths",
    "hashed_owner",
    "modulo_owner",
    "sharding_of",
]
