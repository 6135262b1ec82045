"""What benchmarks of tables larger than their memory share: cutting them to a room, writing every row
once, and what the tiers counted meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hotbed as hb

WRITTEN_AT_ONCE = 1 << 17


def cut_to_fit(rows: tuple[int, ...], row_bytes: int, room: float) -> tuple[int, ...]:
    """The same tables, the largest cut alike so that all take at most `room` bytes."""
    low, high = 1, max(rows)
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(min(n, middle) for n in rows) * row_bytes <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return tuple(min(n, low) for n in rows)


def write_all(embeddings: Any, name: str, ids: Tensor, zeros: bool = False) -> None:
    """Writes the first values of `ids`, so that each has a row: otherwise a miss would cost no read.

    `zeros`: the table starts from zeros, so its first values need not be looked up.
    """
    for some in ids.split(WRITTEN_AT_ONCE):
        if zeros:
            values = torch.zeros(len(some), embeddings.tables[name].dim)
        else:
            values = embeddings.lookup(name, some)
        embeddings.assign(name, some, values)


def look_popular_up(
    embeddings: hb.EmbeddingCollection, counts: Mapping[str, int], at_once: int
) -> None:
    """Brings up the first so many ids of each table, the first of all last, as after a long training."""
    nothing = hb.Jagged(torch.zeros(0, dtype=torch.int64), lengths=torch.tensor([0]))
    idle = dict.fromkeys(embeddings.features, nothing)
    first = {table: name for name, table in reversed(embeddings.features.items())}
    for table, count in counts.items():
        for ids in torch.arange(count).flip(0).split(at_once):
            embeddings({**idle, first[table]: hb.Jagged(ids, lengths=torch.tensor([len(ids)]))})


@dataclass(frozen=True)
class Counts:
    """What the tiers did between two `stats()` of a collection."""

    used: float
    """Distinct rows of each batch."""
    missed: float
    """Rows of them that were brought up."""
    batches: float
    move_ms: float

    @classmethod
    def between(cls, before: dict[str, float], after: dict[str, float]) -> Counts:
        """Without tiers nothing is brought up but rows that are created."""
        names = ("rows_used", "rows_missed", "batches", "move_ms")
        return cls(*(after.get(name, 0) - before.get(name, 0) for name in names))

    @property
    def hit_rate(self) -> float:
        return 1 - self.missed / self.used if self.used else 1.0
