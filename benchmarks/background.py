"""Saves in the background: what the training loses by them, against saves that it waits for."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks import over_ssd as on_disk
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report

TABLES, DIM, HIDDEN, BATCH = 26, 64, 512, 1024
ROWS, QUICK_ROWS = 650_000, 4_000
"""Of each table; 4.3 GB of weights in all."""
ROUNDS = 3
WARM_UP = 20
OFTEN = 0.6
"""Share of the rows of which three quarters of a batch are, so that these stay in memory."""
STEPS_ALONE = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    on_disk.add_options(parser, "hold a quarter of the rows on an SSD, with look-ahead")


class Model(nn.Module):
    """Tables, and a dense part that takes most of a step."""

    def __init__(self, rows: int, storage: hb.Storage | None) -> None:
        super().__init__()
        tables = [hb.Table(f"t{n}", DIM, rows) for n in range(TABLES)]
        self.embeddings = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        self.top = nn.Sequential(nn.Linear(TABLES * DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.top(torch.cat([*self.embeddings(batch).values()], 1))


class Training:
    """Steps over ids none of which comes again before half of all have."""

    def __init__(self, rows: int, batch: int, ssd: Path | None) -> None:
        storage, self.in_memory = None, 1.0
        if ssd is not None:
            storage = on_disk.storage_for(TABLES * rows, DIM * 8, ssd)
        self.model = Model(rows, storage)
        self.optimizer = hb.optim.Adagrad(self.model.parameters(), lr=0.01)
        self._batches = self._shuffled(rows, batch)
        if ssd is not None:
            on_disk.fill(self.model.embeddings)
            self._batches = iter(hb.lookahead(self._batches, self.model))
            missed = 0.0
            for _ in range(3):  # until evictions go on evenly
                before = self.model.embeddings.stats()
                for _ in range(TABLES * rows // (TABLES * batch) // 3):
                    self.step()
                after = self.model.embeddings.stats()
                missed = after["rows_missed"] - before["rows_missed"]
                self.in_memory = 1 - missed / (after["rows_used"] - before["rows_used"])

    def _shuffled(self, rows: int, batch: int) -> Iterator[dict[str, Tensor]]:
        often = int(rows * OFTEN)
        parts = ((torch.arange(often), batch * 3 // 4), (torch.arange(often, rows), batch // 4))
        cycles = {
            name: [_cycle(ids[torch.randperm(len(ids))], count) for ids, count in parts]
            for name in self.model.embeddings.tables
        }
        while True:
            yield {name: torch.cat([next(some) for some in of]) for name, of in cycles.items()}

    def step(self) -> float:
        """Take one, and return its milliseconds."""
        begin = time.perf_counter()
        batch = next(self._batches)
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (time.perf_counter() - begin) * 1e3


def _cycle(ids: Tensor, count: int) -> Iterator[Tensor]:
    """Yield so many of them at once, again and again."""
    while True:
        for begin in range(0, len(ids) - count + 1, count):
            yield ids[begin : begin + count]


class Peak:
    """The most resident memory while it is open, in MB above that at its beginning."""

    def __enter__(self) -> Peak:
        self._before, self.above = _resident(), 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.above = max(self.above, _resident() - self._before)


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def run(
    *,
    quick: bool,
    progress: Callable[[str], None],
    folder: Path | None = None,
    over_ssd: bool = False,
) -> Report:
    with tempfile.TemporaryDirectory(dir=folder) as ssd:
        return _run(quick, progress, folder, Path(ssd) if over_ssd else None)


def _run(
    quick: bool, progress: Callable[[str], None], folder: Path | None, ssd: Path | None
) -> Report:
    report = Report("background", quick)
    rows, batch = (QUICK_ROWS, 256) if quick else (ROWS, BATCH)
    progress("tables")
    training = Training(rows, batch, ssd)
    for _ in range(WARM_UP):
        training.step()
    steps = {"alone": Timing(), "background": Timing()}
    saves = {"blocking": Timing(), "background": Timing()}
    lost, waited, above = [], [], []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        hb.save(Path(scratch), training.model, training.optimizer, step=0)  # memory for files
        for number in range(1 if quick else ROUNDS):
            progress(f"round {number + 1} of {ROUNDS}")
            with OtherWork() as other:
                steps["alone"].ms += [training.step() for _ in range(10 if quick else STEPS_ALONE)]
                begin = time.perf_counter()
                hb.save(Path(scratch), training.model, training.optimizer, step=2 * number, keep=1)
                saves["blocking"].ms.append((time.perf_counter() - begin) * 1e3)
                with Peak() as peak:
                    found = _steps_beside(training, Path(scratch), 2 * number + 1)
            usual = statistics.median(steps["alone"].ms)
            saves["background"].ms.append(found.seconds * 1e3)
            steps["background"].ms += found.steps
            lost.append(found.begin_ms + sum(found.steps) - usual * len(found.steps))
            waited.append(found.waited)
            above.append(peak.above)
            for timing in (*steps.values(), *saves.values()):
                timing.other_work = max(timing.other_work, other.share)
    _tell(report, rows, batch, steps, saves)
    blocking = saves["blocking"].median
    bound = max(64 << 20, TABLES * rows * (DIM * 8 + 8) // 20) / 1e6
    figures = {
        "time that the training loses, over that of a blocking save": statistics.median(lost)
        / blocking,
        "seconds that steps have waited for memory": statistics.median(waited),
        "99.9th percentile of a step beside a save, over that of one alone": _high(
            steps["background"].ms
        )
        / _high(steps["alone"].ms),
        "time of a save in the background, over that of a blocking one": saves["background"].median
        / blocking,
        "MB above those for rows that wait, at most": max(above) - bound,
        "MB for rows that wait": bound,
    }
    report.figures.update({name: round(value, 3) for name, value in figures.items()})
    where = "rows in memory"
    if ssd is not None:
        where = f"room for {on_disk.IN_MEMORY:.0%} of the rows in memory, others on an SSD, with look-ahead"
        report.figures["share of a step's rows that were in memory"] = round(training.in_memory, 3)
    report.remark(
        f"{torch.get_num_threads()} threads train on {os.cpu_count()} processors. "
        f"Adagrad, {where}, ids that do not repeat for half an epoch, a dense part of 1,664 x 512, each file "
        "synced; lost: the call itself, and what steps take beyond the median of those alone until it is "
        "complete."
    )
    return report


class _Beside:
    begin_ms: float
    seconds: float
    waited: float
    steps: list[float]


def _steps_beside(training: Training, folder: Path, step: int) -> _Beside:
    """Train until a save in the background is complete."""
    found = _Beside()
    begin = time.perf_counter()
    saving = hb.save(folder, training.model, training.optimizer, step=step, keep=1, blocking=False)
    found.begin_ms = (time.perf_counter() - begin) * 1e3
    found.steps = []
    while not saving.done():
        found.steps.append(training.step())
    found.seconds, found.waited = saving.wait().seconds, saving.waited
    return found


def _tell(
    report: Report, rows: int, batch: int, steps: dict[str, Timing], saves: dict[str, Timing]
) -> None:
    shape = f"{TABLES} x {rows:,} x {DIM} float32"
    for name, timing in saves.items():
        report.add(name, f"a save, {shape}", timing)
    for name, timing in steps.items():
        report.add(name, f"a step, {shape}, batch {batch}", timing)


def _high(ms: list[float]) -> float:
    return sorted(ms)[min(len(ms) - 1, int(len(ms) * 0.999))]
