"""Counts of ids in bounded memory: how many are distinct, and how skewed they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["IdCounts", "Skew"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ALWAYS = 4096
"""Most frequent ids that are counted also when not all are."""
_POINTS = 60


class Skew(NamedTuple):
    """How unevenly ids are used."""

    first: float
    """Share of all uses that is the most frequent id's."""
    hundredth: float
    """Share that is of the most frequent 1 % of ids, of one id at least."""
    curve: tuple[tuple[float, float], ...]
    """(share of ids, the most frequent first; share of uses), rising to (1, 1)."""


class IdCounts:
    """Counts of ids, exact up to `most` distinct ones.

    Beyond, the ids that are most frequent by then are counted on, and of the others those whose hash ends in
    k zero bits, which stand for 2**k each (Wegman's adaptive sampling: Flajolet, "On adaptive sampling",
    1990).
    """

    def __init__(self, most: int = 1 << 20) -> None:
        self.total = 0
        """Ids that were added."""
        self._most = most
        self._bits = 0
        self._ids, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._always = np.empty(0, np.int64)
        self._waiting: list[Ints] = []
        self._waiting_size = 0

    def add(self, ids: Ints) -> None:
        """Count (n,) ids."""
        self.total += len(ids)
        self._waiting.append(ids)
        self._waiting_size += len(ids)
        if self._waiting_size >= self._most:
            self._merge()

    @property
    def is_exact(self) -> bool:
        """True if every id is counted."""
        self._merge()
        return self._bits == 0

    def distinct(self) -> int:
        """Number of distinct ids, or an estimate of it."""
        return round(float(self._stand_for().sum()))

    def skew(self) -> Skew:
        """How unevenly the ids are used."""
        weights = self._stand_for()
        order = np.argsort(-self._counts, kind="stable")
        counts, weights = self._counts[order].astype(np.float64), weights[order]
        ids, uses = np.cumsum(weights), np.cumsum(counts * weights)
        if not len(ids):
            return Skew(0.0, 0.0, ())
        share_of_ids, share_of_uses = ids / ids[-1], uses / uses[-1]

        def at(share: Floats) -> Floats:
            # Between two ids a line; the first id is a whole one.
            found: Floats = np.interp(
                share, np.append(0, share_of_ids), np.append(0, share_of_uses)
            )
            return found

        points = np.geomspace(max(1 / ids[-1], 1e-9), 1.0, _POINTS) if len(ids) > 1 else np.ones(1)
        top = max(0.01, 1 / ids[-1])
        curve = tuple(zip(points.tolist(), at(points).tolist(), strict=True))
        return Skew(float(counts[0] / self.total), float(at(np.array([top]))[0]), curve)

    def _stand_for(self) -> Floats:
        """(n,) ids that each counted id stands for."""
        self._merge()
        return np.where(np.isin(self._ids, self._always), 1.0, 2.0**self._bits)

    def _merge(self) -> None:
        if not self._waiting:
            return
        new, counts = np.unique(np.concatenate(self._waiting), return_counts=True)
        self._waiting, self._waiting_size = [], 0
        kept = self._is_counted(new)
        both = np.concatenate([self._ids, new[kept]])
        self._ids, at = np.unique(both, return_inverse=True)
        merged = np.zeros(len(self._ids), np.int64)
        np.add.at(merged, at, np.concatenate([self._counts, counts[kept]]))
        self._counts = merged
        while len(self._ids) > self._most:
            if not self._bits:
                frequent = np.argpartition(-self._counts, min(_ALWAYS, self._most // 2))
                self._always = np.sort(self._ids[frequent[: min(_ALWAYS, self._most // 2)]])
            self._bits += 1
            kept = self._is_counted(self._ids)
            self._ids, self._counts = self._ids[kept], self._counts[kept]

    def _is_counted(self, ids: Ints) -> NDArray[np.bool_]:
        if not self._bits:
            return np.ones(len(ids), np.bool_)
        hashes = ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(0xD6E8FEB86659FD93)
        chosen: NDArray[np.bool_] = hashes >> np.uint64(64 - self._bits) == 0
        return chosen | np.isin(ids, self._always)
