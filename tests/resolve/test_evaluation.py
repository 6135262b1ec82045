"""Evaluation in the middle of an open look-ahead window leaves everything as it was: files, what is
evicted next, counters. A twin that never evaluates shows what that is."""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from resolve.small_logs import in_memory, small_logs
from torch import Tensor, nn

import hotbed as hb
from hotbed import _core
from hotbed.ahead.window import BRINGING_UP, READING, Window

DIM = 64
ROWS = 400
MOMENTS = ("before forward", "before backward", "before step", "before zero_grad", "after")
BUDGETS: dict[str, dict[str, Any]] = {
    "device over host": {"device": 290_000, "host": "16MB"},
    "host over ssd": {"host": 4_751_000},
    "device over host over ssd": {"device": 290_000, "host": 4_618_000},
}


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Many tiny batches."""
    set_threads(1)


@pytest.fixture(autouse=True)
def reading_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the clock decides how many batches are known when a row is evicted."""
    task = Window.task

    def in_order(window: Window, work: str) -> Callable[[], None] | None:
        if work == BRINGING_UP and (READING in window.at_work or task(window, READING)):
            return None
        return task(window, work)

    monkeypatch.setattr(Window, "task", in_order)


@dataclasses.dataclass
class Run:
    tiers: str
    optimizer: str
    options: dict[str, Any]
    depth: int
    horizon: int
    seed: int
    steps: int
    evaluations: dict[tuple[int, str], list[str]]
    """(step, moment) → what is done there."""


@st.composite
def runs(draw: Any) -> Run:
    steps = draw(st.integers(6, 20))
    at = st.tuples(st.integers(0, steps - 1), st.sampled_from(MOMENTS))
    kinds = st.lists(st.sampled_from(sorted(READS)), min_size=1, max_size=3)
    optimizer, options = draw(
        st.sampled_from(
            (
                ("Adagrad", {"lr": 0.1}),
                ("Adam", {"lr": 0.1}),
                ("AdamW", {"lr": 0.1, "untouched": "exact"}),
                ("Adagrad", {"lr": 0.1, "fused": True}),
            )
        )
    )
    return Run(
        tiers=draw(st.sampled_from(sorted(BUDGETS))),
        optimizer=optimizer,
        options=options,
        depth=draw(st.sampled_from((1, 2, 3))),
        horizon=draw(st.sampled_from((3, 8))),
        seed=draw(st.integers(0, 1000)),
        steps=steps,
        evaluations=draw(st.dictionaries(at, kinds, min_size=1, max_size=6)),
    )


class Model(nn.Module):
    def __init__(self, storage: hb.Storage) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(
            [hb.Table("item", DIM, ROWS), hb.Table("user", DIM)], seed=0, storage=storage
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return sum(v.sin().sum() for v in self.embeddings(batch).values())


def batches(count: int, seed: int, size: int = 60) -> list[dict[str, Tensor]]:
    """Popular ids and rare ones."""
    generator = torch.Generator().manual_seed(seed)

    def ids(among: int) -> Tensor:
        return (among * torch.rand(size, generator=generator) ** 2).long()

    return [{"item": ids(ROWS), "user": ids(900) * 10**9} for _ in range(count)]


# -- what evaluation may do --------------------------------------------------------------------------


def evaluate(model: Model, optimizer: Any, batch: dict[str, Tensor]) -> None:
    model.eval()
    with torch.no_grad():
        model(batch)
    model.train()


def evaluate_with_gradients(model: Model, optimizer: Any, batch: dict[str, Tensor]) -> None:
    model.eval()
    model(batch)
    model.train()


def forward_without_gradients(model: Model, optimizer: Any, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model(batch)


def look_up(model: Model, optimizer: Any, batch: dict[str, Tensor]) -> None:
    for name, ids in batch.items():
        model.embeddings.lookup(name, ids)


def read_all(model: Model, optimizer: Any, batch: dict[str, Tensor]) -> None:
    for name in batch:
        model.embeddings.rows(name)


def count(model: Model, optimizer: Any, batch: dict[str, Tensor]) -> None:
    model.embeddings.memory()
    model.embeddings.count()
    repr(model)


def save(model: Model, optimizer: Any, batch: dict[str, Tensor]) -> None:
    model.state_dict()
    optimizer.state_dict()


READS: dict[str, Callable[[Model, Any, dict[str, Tensor]], None]] = {
    f.__name__: f
    for f in (
        evaluate,
        evaluate_with_gradients,
        forward_without_gradients,
        look_up,
        read_all,
        count,
        save,
    )
}


# -- what it must not change -------------------------------------------------------------------------


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was written, and what is in it."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def counted(model: Model) -> dict[str, float]:
    """All counters but those of such reads, and the memory that reading from the SSD takes."""
    reads = ("rows_read_past", "rows_from_host", "rows_from_ssd", "memory_bytes")
    return {k: v for k, v in model.embeddings.stats().items() if k not in reads}


def check_that_reading_changes_nothing(
    model: Model, optimizer: Any, folder: Path, kinds: list[str], seed: int
) -> None:
    before = counted(model)
    # What training has written may still be on its way to the files, for a while.
    for attempt in range(1000):
        as_before = files(folder)
        for kind in kinds:
            (batch,) = batches(1, seed + attempt, size=300)
            READS[kind](model, optimizer, batch)
        if files(folder) == as_before:
            break
    else:
        pytest.fail(f"{kinds} writes to {folder}")
    assert counted(model) == before


def wait_until_idle(model: Model) -> None:
    """Until look-ahead has nothing more to do before the next batch is taken."""
    tiers: Any = model.embeddings.group.tiers
    window: Window = tiers._window()

    def idle() -> bool:
        return not window.at_work and not any(map(window.task, (READING, BRINGING_UP)))

    with window._moved:
        window._moved.wait_for(idle)


def train(run: Run, folder: Path, evaluations: dict[tuple[int, str], list[str]]) -> Any:
    """Losses, counters of every step, rows, and what lies in the log in the end."""
    ssd: dict[str, Any] = {"ssd": folder} if "ssd" in run.tiers else {}
    model = Model(hb.Storage(**BUDGETS[run.tiers], **ssd))
    optimizer: Any = getattr(hb.optim, run.optimizer)(model.parameters(), **run.options)
    losses, steps = [], []

    def moment(at: int, name: str) -> None:
        if kinds := evaluations.get((at, name)):
            check_that_reading_changes_nothing(model, optimizer, folder, kinds, at)

    data = batches(run.steps, run.seed)
    for at, batch in enumerate(hb.lookahead(data, model, run.depth, run.horizon)):
        wait_until_idle(model)  # so that what is admitted when does not depend on the clock
        moment(at, "before forward")
        loss = model(batch)
        moment(at, "before backward")
        loss.backward()
        moment(at, "before step")
        optimizer.step()
        moment(at, "before zero_grad")
        optimizer.zero_grad()
        moment(at, "after")
        losses.append(loss.item())
        # Not what depends on the clock: times, and how far look-ahead was when the batch was taken.
        steps.append(
            {k: v for k, v in counted(model).items() if not k.endswith(("_ms", "_depth", "_ahead"))}
        )
    rows = {name: model.embeddings.rows(name) for name in ("item", "user")}
    return losses, steps, rows


def log_of(folder: Path) -> dict[tuple[str, int], bytes]:
    """The records that lie on the SSD, by table and id."""
    held = {}
    for path in folder.glob("rows-*"):
        log = _core.RowLog.open_to_read(str(path))
        for store, (record_bytes, tables) in enumerate(log.stores):
            for number, name, _ in tables:
                ids = np.empty(log.rows(store, number), np.int64)
                log.ids(store, number, ids)
                records = np.empty((len(ids), record_bytes), np.uint8)
                found = np.zeros(len(ids), bool)
                log.read(store, np.full(len(ids), number, np.int32), ids, records, found)
                held |= {(name, int(i)): r.tobytes() for i, r in zip(ids, records, strict=True)}
        log.close()
    return held


@pytest.mark.filterwarnings("ignore:The budget holds")
@settings(max_examples=examples(12, 600))
@given(run=runs())
def test_evaluation_leaves_no_trace(run: Run) -> None:
    left = []
    with small_logs(), tempfile.TemporaryDirectory(dir=in_memory(), prefix="hotbed-test-") as held:
        for name, evaluations in (("with", run.evaluations), ("without", {})):
            folder = Path(held, name)
            folder.mkdir()
            result = train(run, folder, evaluations)
            gc.collect()
            left.append((*result, log_of(folder)))
    (losses, steps, rows, log), (twin_losses, twin_steps, twin_rows, twin_log) = left
    assert losses == twin_losses
    assert steps == twin_steps
    for name, of_table in rows.items():
        assert torch.equal(of_table.ids, twin_rows[name].ids)
        assert torch.equal(of_table.values, twin_rows[name].values)
    assert log == twin_log
