"""Caches of rows that rank exactly what they hold: the rivals of `eviction`, and its yardstick."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np

NEVER = 1 << 40
"""A batch that does not come."""


@dataclass
class Trace:
    """Batches of distinct rows, in order of first appearance, of one cache."""

    name: str
    batches: list[np.ndarray]  # int64: row numbers 0 .. rows - 1
    rows: int
    tables: np.ndarray  # int64 (rows,): the table of each row, rising
    ids: np.ndarray  # int64 (rows,): its id there, rising within a table

    def numbers(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Row numbers of ids, which occur in the trace."""
        result = np.empty(len(ids), np.int64)
        for t in np.unique(tables):
            begin, end = np.searchsorted(self.tables, [t, t + 1])
            mine = tables == t
            result[mine] = begin + np.searchsorted(self.ids[begin:end], ids[mine])
        return result

    def next_uses(self) -> list[np.ndarray]:
        """For each row of each batch, the batch in which it comes next, or NEVER."""
        upcoming = np.full(self.rows, NEVER)
        result = []
        for b in range(len(self.batches) - 1, -1, -1):
            result.append(upcoming[self.batches[b]])
            upcoming[self.batches[b]] = b
        return result[::-1]


class Order(abc.ABC):
    """Who leaves: the row of lowest `rank`. Told what happens, in batches."""

    def __init__(self, rows: int) -> None:
        self.last = np.full(rows, -1)
        self.clock = 0

    def use(self, keys: np.ndarray) -> None:
        """Later positions of a batch count as more recent."""
        self.last[keys] = np.arange(self.clock, self.clock + len(keys))
        self.clock += len(keys)

    def evicted(self, keys: np.ndarray) -> None:
        """These have left."""
        return None

    @abc.abstractmethod
    def rank(self, keys: np.ndarray) -> np.ndarray:
        """Of each key; the lowest leaves."""


class LeastRecent(Order):
    """LRU."""

    def rank(self, keys: np.ndarray) -> np.ndarray:
        return self.last[keys].astype(np.float64)


class LeastFrequent(Order):
    """LFU: uses are batches; ties leave by recency. `remembers`: counts outlive an eviction."""

    def __init__(self, rows: int, remembers: bool = False) -> None:
        super().__init__(rows)
        self.remembers = remembers
        self.count = np.zeros(rows)

    def use(self, keys: np.ndarray) -> None:
        super().use(keys)
        self.count[keys] += 1

    def evicted(self, keys: np.ndarray) -> None:
        if not self.remembers:
            self.count[keys] = 0

    def rank(self, keys: np.ndarray) -> np.ndarray:
        return self.count[keys] + self.last[keys] / (self.clock + 1)


class Fading(Order):
    """Uses whose weight halves while `half_life` rows are used: LRFU."""

    def __init__(self, rows: int, half_life: float, remembers: bool) -> None:
        super().__init__(rows)
        self.half_life = half_life
        self.remembers = remembers
        self.score = np.full(rows, -np.inf)

    def use(self, keys: np.ndarray) -> None:
        self.score[keys] = np.logaddexp2(self.score[keys], self.clock / self.half_life)
        super().use(keys)

    def evicted(self, keys: np.ndarray) -> None:
        if not self.remembers:
            self.score[keys] = -np.inf

    def rank(self, keys: np.ndarray) -> np.ndarray:
        return self.score[keys]


class Rate(LeastFrequent):
    """Uses over the time since the first one."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, remembers=True)
        self.first = np.full(rows, -1)

    def use(self, keys: np.ndarray) -> None:
        fresh = keys[self.first[keys] < 0]
        self.first[fresh] = self.clock
        super().use(keys)

    def rank(self, keys: np.ndarray) -> np.ndarray:
        return self.count[keys] / (self.clock - self.first[keys] + 1)


def repeat_misses(
    trace: Trace, capacity: int, order: Order, *, depth: int = 1, horizon: float = 0
) -> int:
    """Rows that a batch needs, that were in the cache before, and are not now.

    Before batch t is used, batches t .. t + depth - 1 are made resident and stay until they are
    used; the ids of batches below t + horizon are known. Rows of unknown next use leave first, by
    `order`, then those of the farthest one: with an infinite horizon that is Belady's rule.
    """
    resident = np.zeros(trace.rows, bool)
    pins = np.zeros(trace.rows, np.int32)
    seen = np.zeros(trace.rows, bool)
    next_use = np.full(trace.rows, NEVER)
    uses = trace.next_uses()
    held = misses = 0
    for b, keys in enumerate(trace.batches):
        t = b - depth + 1
        if t > 0:
            order.use(trace.batches[t - 1])
            pins[trace.batches[t - 1]] -= 1
        pins[keys] += 1
        next_use[keys] = uses[b]
        absent = keys[~resident[keys]]
        misses += int(seen[absent].sum())
        seen[absent] = True
        leaving = held + len(absent) - capacity
        if leaving > 0:
            candidates = np.flatnonzero(resident & (pins == 0))
            if len(candidates) < leaving:
                raise ValueError(f"{depth} batches do not fit into {capacity} rows")
            when = next_use[candidates]
            rank = order.rank(candidates)
            known = when < t + horizon if np.isfinite(horizon) else np.ones(len(when), bool)
            # All known rows rank above all others.
            rank = np.where(known, 1e18 - when * 1e4, rank)
            out = candidates[np.argpartition(rank, leaving - 1)[:leaving]]
            resident[out] = False
            order.evicted(out)
            held -= len(out)
        resident[absent] = True
        held += len(absent)
    return misses
