"""Trainings whose every step is known: the rows that one thread alone gets, without tiers.

Somebody who reads beside the same training must see the rows of one of its steps.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import hotbed as hb

IDS = 160
"""Of each table, that training uses; those above are left to others."""
ALL_IDS = 200
TABLES = ("static", "dynamic", "wide")

RULES: dict[str, Callable[..., Any]] = {
    "sgd": lambda p, **o: hb.optim.SGD(p, lr=0.5, **o),
    "momentum": lambda p, **o: hb.optim.SGD(p, lr=0.1, momentum=0.5, **o),
    "adagrad": lambda p, **o: hb.optim.Adagrad(p, lr=0.1, **o),
    "adam": lambda p, **o: hb.optim.Adam(p, lr=0.01, **o),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"untouched": "exact"},
    "fused": {"fused": True},
}


def collection(storage: hb.Storage | None = None) -> hb.EmbeddingCollection:
    tables = [
        hb.Table("static", 4, ALL_IDS, combiner="none"),
        hb.Table("dynamic", 4, combiner="none"),
        hb.Table("wide", 20, combiner="none"),
    ]
    return hb.EmbeddingCollection(tables, seed=3, storage=storage)


def ids_of(name: str, numbers: Tensor) -> Tensor:
    """(n,) ids from numbers below ALL_IDS: those of dynamic tables are far apart."""
    return numbers if name == "static" else numbers * 1_000_003 - 7


def batches(seed: int, count: int) -> list[dict[str, Tensor]]:
    """Ids with duplicates, more of them new in later batches."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(count):
        top = max(8, IDS * (step + 1) // count)
        drawn = (torch.randint(0, top, (30,), generator=generator) for _ in TABLES)
        made.append(dict(zip(TABLES, map(ids_of, TABLES, drawn), strict=True)))
    return made


def loss_of(vectors: dict[str, Tensor]) -> Tensor:
    total: Any = sum((v.sin() + 0.5 * v).sum() for v in vectors.values())
    return total


def step(model: hb.EmbeddingCollection, optimizer: Any, batch: dict[str, Tensor]) -> None:
    loss_of(model(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclasses.dataclass
class History:
    """The rows after each step of a training; number 0: before the first."""

    rows: dict[str, Tensor]
    """name → (steps + 1, IDS, dim)"""
    begun: int = 0
    done: int = 0

    @classmethod
    def of(cls, data: Sequence[dict[str, Tensor]], rule: str, options: str) -> History:
        model = collection()
        optimizer = RULES[rule](model.parameters(), **OPTIONS[options])
        numbers = torch.arange(IDS)

        def now() -> list[Tensor]:
            return [model.lookup(name, ids_of(name, numbers)).clone() for name in TABLES]

        seen = [now()]
        for batch in data:
            step(model, optimizer, batch)
            seen.append(now())
        return cls(
            {
                name: torch.stack(rows)
                for name, rows in zip(TABLES, zip(*seen, strict=True), strict=True)
            }
        )

    def train(self, model: Any, optimizer: Any, data: Any, over: threading.Event) -> None:
        """The same steps, told as they begin and end."""
        for batch in data:
            self.begun += 1
            step(model, optimizer, batch)
            self.done += 1
            if over.is_set():
                return

    def check(self, read: Callable[[], dict[str, tuple[Tensor, Tensor]]]) -> None:
        """`read` gives name → (numbers (n,), rows (n, dim)), which must be those of one step that was
        the last one at some time while it read."""
        after = self.done
        found = read()
        before = self.begun
        off = []
        for at in range(after, before + 1):
            wrong = [
                name
                for name, (numbers, rows) in found.items()
                if not torch.equal(rows, self.rows[name][at][numbers])
            ]
            if not wrong:
                return
            off.append((at, wrong))
        matches = {
            name: [
                at
                for at in range(len(self.rows[name]))
                if torch.equal(rows, self.rows[name][at][numbers])
            ]
            for name, (numbers, rows) in found.items()
        }
        raise AssertionError(
            f"rows of no step between {after} and {before} (step, tables that differ): {off}; each "
            f"table by itself is as after step {matches}"
        )


def numbers(chance: random.Random, most: int = 40) -> Tensor:
    return torch.tensor([chance.randrange(IDS) for _ in range(chance.randint(1, most))])
