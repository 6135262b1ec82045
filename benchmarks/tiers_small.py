"""Small batches of a small model whose rows are read from disk, a few hundred a step."""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.tables import Counts, write_all
from benchmarks.workload import power_law_ranks

USERS, ITEMS, DIM = 29_858, 40_981, 64
"""As many as the graph of Gowalla has."""
RECORD = 3 * DIM * 4
SHARES = (0.5, 0.25)
STEPS = {256: (200, 300), 1024: (100, 100)}
"""By batch size: steps before what is measured, and measured, in each of three rounds."""
ROUNDS = 3
MODES = {"memory": None, "no look-ahead": 0, "look-ahead": 2}
"""And depth."""


class Ranking(nn.Module):
    """Users and items as vectors; a user's items score more than others (BPR, Rendle et al., UAI 2009)."""

    def __init__(self, storage: Any) -> None:
        import hotbed as hb

        super().__init__()
        tables = [hb.Table("user", DIM, rows=USERS), hb.Table("item", DIM, rows=ITEMS)]
        features = {"user": "user", "bought": "item", "other": "item"}
        self.embeddings = hb.EmbeddingCollection(tables, features, seed=0, storage=storage)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.embeddings(batch)
        difference = vectors["user"] * (vectors["bought"] - vectors["other"])
        return -nn.functional.logsigmoid(difference.sum(1)).mean()


class _Run:
    """One model, and what was measured of it."""

    def __init__(self, depth: int | None, budget: int, folder: Path) -> None:
        import hotbed as hb

        self.depth = depth
        storage = None if depth is None else hb.Storage(host=budget, ssd=folder)
        self.model = Ranking(storage)
        self.optimizer = hb.optim.Adam(self.model.parameters(), lr=1e-3)
        for name, rows in (("user", USERS), ("item", ITEMS)):
            write_all(self.model.embeddings, name, torch.arange(rows))
        self.timing = Timing()
        self.cpu_ms: list[float] = []
        self.missed: list[float] = []

    def round(self, batches: list[dict[str, Tensor]], warm_up: int) -> None:
        import hotbed as hb

        feed: Any = hb.lookahead(batches, self.model, self.depth or 0)
        before, cpu, began = {}, 0.0, 0.0
        with OtherWork() as other:
            for at, batch in enumerate(feed):
                if at == warm_up:
                    before, cpu = self.model.embeddings.stats(), _cpu_seconds()
                    began = time.perf_counter()
                self.model(batch).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        steps = len(batches) - warm_up
        # Steps are too short, and too uneven, to be timed one by one.
        self.timing.ms.append((time.perf_counter() - began) / steps * 1e3)
        self.timing.other_work = max(self.timing.other_work, other.share)
        self.cpu_ms.append((_cpu_seconds() - cpu) / steps * 1e3)
        self.missed.append(Counts.between(before, self.model.embeddings.stats()).missed / steps)


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("tiers-small", quick)
    folder = Path(os.environ.get("HOTBED_BENCH_DISK", tempfile.gettempdir()))
    model_bytes = (USERS + ITEMS) * RECORD
    report.figures["bytes of rows and states"] = model_bytes
    for size, (warm_up, measured) in STEPS.items():
        if quick:
            warm_up, measured = 10, 10
        batches = _batches(warm_up + measured, size)
        for share in SHARES:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                runs = {}
                for mode, depth in MODES.items():
                    progress(f"batch {size}, {share:.0%} of memory: writing rows, {mode}")
                    runs[mode] = _Run(depth, int(share * model_bytes), Path(scratch) / mode)
                for number in range(1 if quick else ROUNDS):
                    for mode, one in runs.items():
                        progress(f"batch {size}, {share:.0%} of memory: round {number + 1}, {mode}")
                        one.round(batches, warm_up)
                _add(report, f"batch {size}, {share:.0%}", runs)
                del runs, one
    report.remarks.append(
        "A step trains users, items and as many others with Adam, two tables of 54 MB with states. "
        "Shares are of their bytes, index and buffers included; every row was written to the log first. "
        "A ratio is steps a second over those in memory, in rounds that take turns; a loss is the time "
        "that a step takes more than in memory, over that."
    )
    return report


def _add(report: Report, config: str, runs: dict[str, _Run]) -> None:
    base = statistics.median(runs["memory"].timing.ms)
    for mode, one in runs.items():
        report.add("hotbed", f"{config} of memory, {mode}", one.timing)
        median = statistics.median(one.timing.ms)
        report.figures[f"{config}, {mode}: CPU ms a step"] = statistics.median(one.cpu_ms)
        if mode == "memory":
            continue
        report.ratios[f"{config}, {mode}"] = base / median
        report.figures[f"{config}, {mode}: loss"] = median / base - 1
        report.figures[f"{config}, {mode}: rows brought up a step"] = statistics.median(one.missed)


def _batches(count: int, size: int) -> list[dict[str, Tensor]]:
    """Users alike often, items by a power law, others at random."""
    rng = np.random.default_rng(0)
    ids = {
        "user": rng.permutation(USERS)[power_law_ranks(rng, count * size, USERS, 0.4)],
        "bought": rng.permutation(ITEMS)[power_law_ranks(rng, count * size, ITEMS, 0.75)],
        "other": rng.integers(0, ITEMS, count * size),
    }
    return [
        {name: torch.from_numpy(of[b * size : (b + 1) * size].copy()) for name, of in ids.items()}
        for b in range(count)
    ]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
