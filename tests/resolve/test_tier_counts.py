"""What tiers count adds up: a row that training used was in its slot, or came from a tier that says so, or
was new."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from resolve.small_logs import in_memory, small_logs
from torch import Tensor

import hotbed as hb
from hotbed.places.tiered.budget import _NAMES, by_part

DIM = 64
ROWS = 400
NEVER_TRAINED = 50
BUDGETS: dict[str, dict[str, Any]] = {
    "host over ssd": {"host": 850_000},
    "device over host": {"device": 290_000, "host": "16MB"},
    "device over host over ssd": {"device": 290_000, "host": 700_000},
}
layouts = pytest.mark.parametrize("layout", BUDGETS)


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Many tiny batches."""
    set_threads(1)


def batches(count: int, size: int, seed: int) -> list[dict[str, Tensor]]:
    """Popular ids and rare ones."""
    generator = torch.Generator().manual_seed(seed)

    def ids(among: int) -> Tensor:
        return (among * torch.rand(size, generator=generator) ** 2).long()

    return [{"item": ids(ROWS), "user": ids(900) * 10**9} for _ in range(count)]


class Counted:
    """A collection in tiers, its training, and what its counters are to be."""

    def __init__(self, layout: str, folder: str) -> None:
        ssd: dict[str, Any] = {"ssd": folder} if "ssd" in layout else {}
        self.layout = layout
        self.embeddings = hb.EmbeddingCollection(
            [hb.Table("item", DIM, ROWS + NEVER_TRAINED), hb.Table("user", DIM)],
            seed=0,
            storage=hb.Storage(**BUDGETS[layout], **ssd),
        )
        self.optimizer: Any = hb.optim.Adagrad(self.embeddings.parameters(), lr=0.1)
        self.used = 0
        self.trained: set[tuple[str, int]] = set()
        self.read_before_training = 0  # rows that evaluation asked for

    def train(self, batch: dict[str, Tensor]) -> None:
        sum(v.sin().sum() for v in self.embeddings(batch).values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        rows = rows_of(batch)
        self.used += len(rows)
        self.trained |= rows

    def evaluate(self, batch: dict[str, Tensor]) -> None:
        self.embeddings.eval()
        with torch.no_grad():
            self.embeddings(batch)
        self.embeddings.train()
        self.read_before_training += len(rows_of(batch) - self.trained)

    def trained_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """With a row that training has used in place of each that it has not."""
        some = dict(self.trained)
        return {
            name: torch.tensor(
                [i if (name, i) in self.trained else some[name] for i in ids.tolist()]
            )
            for name, ids in batch.items()
        }

    def check(self) -> dict[str, float]:
        counted = self.embeddings.stats()
        assert counted["rows_used"] == self.used
        assert counted["rows_created"] == len(self.trained)
        below = counted["rows_from_host"] + counted["rows_from_ssd"]
        found_past = counted["rows_read_past"] - self.read_before_training
        hits = counted["rows_used"] - counted["rows_missed"]
        assert hits + (below - found_past) + counted["rows_created"] == self.used
        written = counted["rows_to_host" if "device" in self.layout else "rows_to_ssd"]
        assert written == counted["rows_written_back"]
        return counted


def rows_of(batch: dict[str, Tensor]) -> set[tuple[str, int]]:
    return {(name, i) for name, ids in batch.items() for i in ids.tolist()}


def counts_of_tiers(layout: str) -> dict[str, bool]:
    """Which counts of lower tiers are more than zero in a training that fits nowhere."""
    host, ssd = "device" in layout, "ssd" in layout
    return {"rows_from_host": host, "rows_to_host": host, "rows_from_ssd": ssd, "rows_to_ssd": ssd}


@layouts
@settings(max_examples=examples(6, 300))
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=25),
    evaluated=st.sets(st.integers(0, 24), max_size=5),
)
def test_rows_asked_for_are_accounted_for(
    layout: str, seed: int, sizes: list[int], evaluated: set[int]
) -> None:
    with small_logs(), tempfile.TemporaryDirectory(dir=in_memory(), prefix="hotbed-test-") as held:
        counted = Counted(layout, held)
        for at, size in enumerate(sizes):
            (batch,) = batches(1, size, seed + at)
            counted.train(batch)
            counted.check()
            if at in evaluated:
                counted.evaluate(batches(1, 200, seed + 100 + at)[0])
                counted.check()


@layouts
@pytest.mark.filterwarnings("ignore:The budget holds")
@settings(max_examples=examples(6, 300))
@given(
    seed=st.integers(0, 1000),
    steps=st.integers(1, 30),
    depth=st.integers(1, 3),
    horizon=st.sampled_from((3, 8)),
    evaluated=st.sets(st.integers(0, 29), max_size=5),
)
def test_rows_brought_up_by_look_ahead_are_accounted_for(
    layout: str, seed: int, steps: int, depth: int, horizon: int, evaluated: set[int]
) -> None:
    """In the end, as batches of the window are counted when they are used. New rows of the window have
    slots already, so only trained ones are evaluated."""
    with small_logs(), tempfile.TemporaryDirectory(dir=in_memory(), prefix="hotbed-test-") as held:
        counted = Counted(layout, held)
        data = batches(steps, 60, seed)
        for at, batch in enumerate(hb.lookahead(data, counted.embeddings, depth, horizon)):
            counted.train(batch)
            if at in evaluated:
                counted.evaluate(counted.trained_of(batches(1, 200, seed + 100 + at)[0]))
        stats = counted.check()
        assert stats["batches_unprepared"] < stats["batches"]


@layouts
def test_every_tier_counts(layout: str) -> None:
    with small_logs(), tempfile.TemporaryDirectory(dir=in_memory(), prefix="hotbed-test-") as held:
        counted = Counted(layout, held)
        for batch in batches(40, 60, 0):
            counted.train(batch)
        before = counted.check()
        assert {name: before[name] > 0 for name in counts_of_tiers(layout)} == counts_of_tiers(
            layout
        )


@layouts
def test_evaluation_counts_what_it_reads_past_the_slots(layout: str) -> None:
    with small_logs(), tempfile.TemporaryDirectory(dir=in_memory(), prefix="hotbed-test-") as held:
        counted = Counted(layout, held)
        for batch in batches(40, 60, 0):
            counted.train(batch)

        def changed_by(batch: dict[str, Tensor]) -> dict[str, float]:
            before = counted.embeddings.stats()
            counted.evaluate(batch)
            after = counted.check()
            changes = {
                name: after[name] - before[name] for name in before if name != "memory_bytes"
            }
            return {name: change for name, change in changes.items() if change}

        numbers = torch.arange(900)
        on_meta = {"item": ROWS + numbers % NEVER_TRAINED, "user": numbers % 100 * 10**9 + 1}
        assert changed_by(on_meta) == {"rows_read_past": NEVER_TRAINED + 100}
        changes = changed_by(counted.trained_of({"item": numbers % ROWS, "user": numbers * 10**9}))
        past = changes.pop("rows_read_past")
        in_slots = sum(counted.embeddings.group.tiers.core.capacities())
        assert past == len(counted.trained) - in_slots > 0
        assert sum(changes.values()) == past
        of_tiers = counts_of_tiers(layout)
        assert set(changes) == {name for name in of_tiers if of_tiers[name] and "from" in name}


def test_rows_brought_up_in_vain_and_rows_assigned_count_where_they_were() -> None:
    with small_logs(), tempfile.TemporaryDirectory(dir=in_memory(), prefix="hotbed-test-") as held:
        counted = Counted("device over host", held)
        for batch in batches(40, 60, 0):
            counted.train(batch)
        before = counted.check()
        for _batch in hb.lookahead(batches(10, 60, 100), counted.embeddings, 2, 4):
            break
        after = counted.embeddings.stats()
        assert after["rows_missed"] == before["rows_missed"]
        assert after["rows_from_host"] > before["rows_from_host"]
        ids = torch.tensor(sorted(i for name, i in counted.trained if name == "user"))
        counted.embeddings.assign("user", ids, torch.zeros(len(ids), DIM))
        assigned = counted.embeddings.stats()
        found = assigned["rows_from_host"] - after["rows_from_host"]
        assert 0 < found == assigned["rows_to_host"] - after["rows_to_host"]
        assert assigned["rows_read_past"] == after["rows_read_past"]


@pytest.mark.parametrize("rows", [None, 50_000])
@pytest.mark.parametrize("budgets", [{"host": "20MB"}, {"device": "20MB", "host": "20MB"}])
def test_memory_counts_what_is_used(tmp_path: Path, rows: int | None, budgets: Any) -> None:
    """However large the budgets are; up to a small one once it is full."""
    ids = torch.randperm(50_000, generator=torch.Generator().manual_seed(1))[:1000]
    taken = []
    for large in (False, True):
        sizes = {name: "8GB" for name in budgets} if large else budgets
        storage = hb.Storage(**sizes, ssd=tmp_path / str(large))
        embeddings = hb.EmbeddingCollection([hb.Table("a", 16, rows=rows)], storage=storage)
        optimizer = hb.optim.Adagrad(embeddings.parameters())
        embeddings({"a": ids.view(-1, 1)})["a"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(embeddings.stats()["memory_bytes"])
        if large:
            continue
        for some in torch.arange(50_000).split(2000):
            embeddings({"a": some.view(-1, 1)})["a"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        full = embeddings.stats()["memory_bytes"]
        assert 50_000 * 128 < full < 20_000_000 * len(budgets)
    assert taken[0] < 10_000_000 and taken[1] < 20_000_000


def test_parts_of_a_budget_are_named_from_the_largest_on() -> None:
    parts = dict.fromkeys(_NAMES, 0) | {"bookkeeping": 30, "index": 5, "announced": 7, "moving": 20}
    told = by_part({"total": 62, **parts})
    assert [part.split(": ")[1] for part in told.split(", ")] == ["30", "20", "7", "5"]
