"""Which shard answers for which ids."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hotbed.serve.bundles.reading import BundleTable

__all__ = ["Splits"]


class Splits:
    """Ranges of ids that hold equal numbers of a bundle's rows, one a shard: rows that lie together in a file
    are in the memory of one shard.

    Rows that changed since have the ranges of the bundle, and so has whoever asks.
    """

    def __init__(self, tables: Mapping[str, BundleTable], shards: int) -> None:
        self.shards = shards
        self._begins = {name: _begins(table, shards) for name, table in tables.items()}

    def cuts(self, table: str, ids: NDArray[np.int64]) -> list[int]:
        """Return where in rising (n,) `ids` those of each shard begin, and n."""
        inner = np.searchsorted(ids, self._begins[table])
        return [0, *inner.tolist(), len(ids)]


def _begins(table: BundleTable, shards: int) -> NDArray[np.int64]:
    """Return the least id of each shard but the first."""
    base = table.layers[0]
    at = np.arange(1, shards) * table.about["rows"] // shards
    if base.ids is None or not table.about["rows"]:
        return at
    found: NDArray[np.int64] = np.asarray(base.ids[at], np.int64)
    return found
