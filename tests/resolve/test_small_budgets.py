"""Budgets of a few megabytes: most of them is for rows, and what they must be is told beforehand."""

from __future__ import annotations

import dataclasses
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hotbed as hb

Sizes = list[tuple[int, int]]
"""Rows and dim of each table."""

GRAPH = [(29_858, 64), (40_981, 64)]
WIDTHS = [(10_000, dim) for dim in (4, 8, 16, 32, 64, 128)]
MANY = [(20_000, 16)] * 26


@dataclasses.dataclass(frozen=True)
class Training:
    sizes: Sizes
    size: int
    """Samples of a batch."""
    dynamic: bool = False
    rule: str = "Adam"

    @property
    def model_bytes(self) -> int:
        return sum(rows * dim * 4 * {"SGD": 1, "Adam": 3}[self.rule] for rows, dim in self.sizes)

    def batches(self, count: int = 12) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [
            {
                f"t{k}": torch.randint(0, rows, (self.size,), generator=generator)
                for k, (rows, _) in enumerate(self.sizes)
            }
            for _ in range(count)
        ]

    def make(self, storage: hb.Storage | None) -> tuple[hb.EmbeddingCollection, Any]:
        tables = [
            hb.Table(f"t{k}", dim, rows=None if self.dynamic else rows)
            for k, (rows, dim) in enumerate(self.sizes)
        ]
        embeddings = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        return embeddings, getattr(hb.optim, self.rule)(embeddings.parameters(), lr=0.1)

    def train(self, storage: hb.Storage, depth: int) -> hb.EmbeddingCollection:
        """With a warning where look-ahead does not fit."""
        embeddings, optimizer = self.make(storage)
        for batch in hb.lookahead(self.batches(), embeddings, depth=depth):
            sum(vectors.sum() for vectors in embeddings(batch).values()).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert embeddings.stats()["memory_bytes"] <= embeddings.group.tiers.storage.host
        return embeddings

    def required(self, depth: int) -> dict[str, int]:
        """Of the largest batch, once all rows of dynamic tables are there."""
        embeddings, _ = self.make(None)
        batches = self.batches()
        if self.dynamic:
            for name, table in embeddings.tables.items():
                ids = torch.cat([batch[name] for batch in batches]).unique()
                embeddings.assign(name, ids, torch.zeros(len(ids), table.dim))
        all_of = [embeddings.required(batch, depth) for batch in batches]
        return max(all_of, key=lambda parts: parts["total"])


TRAININGS = [
    Training(GRAPH, 256),
    Training(GRAPH, 256, dynamic=True),
    Training(WIDTHS, 128),
    Training(WIDTHS, 128, dynamic=True),
    Training([(20_900, 64)], 512),
    Training([(90_000, 16)], 512, rule="Adam"),
    Training(MANY, 64),
]


@pytest.mark.parametrize("training", TRAININGS)
def test_a_quarter_of_a_model_suffices(tmp_path: Path, training: Training) -> None:
    budget = training.model_bytes // 4
    assert training.model_bytes >= 16_000_000 and training.required(2)["total"] <= budget
    embeddings = training.train(hb.Storage(host=budget, ssd=tmp_path), 2)
    assert embeddings.group.tiers is not None
    rows = sum(embeddings.group.tiers.core.capacities()) // len({dim for _, dim in training.sizes})
    bytes_a_row = sum({dim * 12 for _, dim in training.sizes})
    assert rows * bytes_a_row > 0.55 * budget


@pytest.mark.parametrize("depth", [0, 2, 4])
@pytest.mark.parametrize(
    "training",
    [*TRAININGS, Training(MANY, 64, dynamic=True, rule="SGD"), Training([(1000, 4)], 64)],
)
def test_what_is_required_suffices(tmp_path: Path, training: Training, depth: int) -> None:
    parts = training.required(depth)
    assert parts["total"] == sum(size for name, size in parts.items() if name != "total")
    held = [
        sum(len(batch[f"t{k}"].unique()) * dim for k, (_, dim) in enumerate(training.sizes))
        for batch in training.batches()
    ]
    states = {"SGD": 1, "Adam": 3}[training.rule]
    assert parts["rows"] >= (depth + 1) * max(held) * 4 * states or training.sizes == [(1000, 4)]
    training.train(hb.Storage(host=parts["total"], ssd=tmp_path), depth)


def test_of_a_device_its_own_budget_is_asked_for() -> None:
    training = Training(GRAPH, 256)
    storage = hb.Storage(device="8MB", host="64MB")
    parts = training.make(storage)[0].required(training.batches()[0])
    assert parts["index"] == parts["buffers"] == 0 < parts["rows"] < parts["total"]


def test_bad_inputs_are_refused() -> None:
    embeddings, _ = Training([(10, 4)], 4).make(None)
    with pytest.raises(hb.InputError, match="'t0' is missing"):
        embeddings.required({})
    with pytest.raises(hb.TableError, match="depth must be a count of batches, 0 or more, got -1"):
        embeddings.required({"t0": torch.arange(3)}, -1)
    with pytest.raises(
        hb.TableError, match="depth must be at most 1,000,000 batches, got a number of"
    ):
        embeddings.required({"t0": torch.arange(3)}, 10**5000)
    with pytest.raises(hb.IdError, match=r"sample 1: id 10 is outside \[0, 10\)"):
        embeddings.required({"t0": torch.tensor([9, 10])})
    with pytest.raises(hb.InputError, match="offsets"):
        embeddings.required({"t0": hb.Jagged(torch.arange(3), torch.tensor([0, 2, 1]))})


def test_more_batches_never_need_less() -> None:
    embeddings, _ = Training([(10**6, 4), (10**9, 16)], 4, dynamic=True).make(None)
    batch = {"t0": torch.arange(4), "t1": torch.arange(4)}
    totals = [embeddings.required(batch, 10**k)["total"] for k in range(7)]
    assert totals == sorted(totals) and totals[-1] > 10**6 * 4 * (4 + 16) * 4


@pytest.mark.parametrize("budget", [300_000, 900_000])
def test_an_error_names_the_sum_and_its_parts(tmp_path: Path, budget: int) -> None:
    with pytest.raises(hb.StorageError) as refused:
        Training(GRAPH, 512).train(hb.Storage(host=budget, ssd=tmp_path), 2)
    found = re.search(r"to at least ([\d,]+) bytes \((.*?)\)", str(refused.value))
    assert found is not None, str(refused.value)
    total, *parts = (int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\d", found[0]))
    assert total == sum(parts) and len(parts) >= 5
    for part in ("rows that are held at once", "queues and write buffers", "index of the SSD"):
        assert f"{part}" in found[2]


class Counting:
    """Batches, and how many of them were read."""

    def __init__(self, size: int, wanted: int) -> None:
        self.batches, self.read = Training([(100_000, 4)], size).batches(300), 0
        self.wanted, self.there = wanted, threading.Event()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.batches:
            self.read += 1
            if self.read == self.wanted:
                self.there.set()
            yield batch


@pytest.mark.parametrize(
    ("size", "host", "known"),
    [(64, "40MB", 128), (8192, "80MB", 32), (512, 900_000, 7), (64, 900_000, 55)],
)
def test_how_many_batches_are_known(tmp_path: Path, size: int, host: int | str, known: int) -> None:
    """Small ones further ahead, and no more ids than are worth their memory."""
    loader = Counting(size, known)
    embeddings, _ = Training([(100_000, 4)], size).make(hb.Storage(host=host, ssd=tmp_path))
    batches = iter(hb.lookahead(loader, embeddings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        next(batches)
        assert loader.there.wait(60)
    batches.close()  # type: ignore[attr-defined]
    assert loader.read <= known + 6
