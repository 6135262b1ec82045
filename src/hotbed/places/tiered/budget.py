"""Parts of a budget: how errors name them, and how many ids look-ahead may know within one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hotbed import _core
from hotbed.arrays import integer
from hotbed.errors import TableError
from hotbed.inputs.bags import Bags
from hotbed.table.lookups import StoredTable
from hotbed.text import brief

__all__ = ["MOST_BATCHES", "by_part", "count_of_batches", "ids_within", "required"]

MOST_BATCHES = 1_000_000
"""Batches that may be asked for at once: products with their ids and the bytes of these stay below 2**63."""

_NAMES = {
    "rows": "rows that are held at once",
    "other_rows": "slots of tables with other records",
    "bookkeeping": "bookkeeping of slots",
    "moving": "rows on their way",
    "buffers": "queues and write buffers of the SSD",
    "index": "index of the SSD",
    "announced": "ids known ahead and growth",
}

_ANNOUNCED_ID = 32
"""Bytes, about, that the core keeps of an id of a batch to come."""

_IDS_A_SLOT = 4  # beyond which they save few reads: docs/internals/eviction.md
_SHARE = 8  # of the budget


def by_part(parts: Mapping[str, int]) -> str:
    """The parts of a sum of bytes, the largest first."""
    named = sorted(((parts[key], name) for key, name in _NAMES.items()), reverse=True)
    return ", ".join(f"{name}: {size:,}" for size, name in named if size)


def ids_within(slots: int, budget: int) -> int:
    """Ids of batches to come that are worth knowing with so many slots in a budget of so many bytes."""
    return min(_IDS_A_SLOT * slots, budget // _SHARE // _ANNOUNCED_ID)


def count_of_batches(name: str, value: object) -> int:
    """The value of that name as an int; raises TableError where it is no count, or beyond MOST_BATCHES."""
    count = integer(value)
    if count is None or count < 0:
        raise TableError(f"{name} must be a count of batches, 0 or more, got {value!r}.")
    if count > MOST_BATCHES:
        raise TableError(f"{name} must be at most {MOST_BATCHES:,} batches, got {brief(value)}.")
    return count


def required(
    live: Sequence[StoredTable], table_of: Sequence[int], bags: Sequence[Bags], depth: int
) -> dict[str, int]:
    """Return the bytes that a budget needs, by part; see `EmbeddingCollection.required`. Bags lie on
    the host."""
    batches = count_of_batches("depth", depth) + 1
    rows = [0] * len(live)
    for t in range(len(live)):
        ids = [bag.ids.flatten() for at, bag in zip(table_of, bags, strict=True) if at == t]
        rows[t] = len(np.unique(torch.cat(ids).numpy())) if ids else 0
    tiers = live[0].place.tiers
    storage = None if tiers is None else tiers.storage
    ssd = storage is None or storage.device is None
    return _core.required_budget([table.core for table in live], rows, batches, ssd)
