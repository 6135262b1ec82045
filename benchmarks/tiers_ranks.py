"""Steps of tables of which a part is in memory, with look-ahead and without: one process, and two ranks."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from benchmarks import worlds
from benchmarks.exchange import other_work
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.tables import write_all
from benchmarks.workload import power_law_ranks

TABLES, DIM, LR = 8, 64, 0.01
RECORD = 2 * DIM * 4
ALPHA = 0.8
MODES: dict[str, tuple[bool, int]] = {
    "in memory": (False, 0),
    "in memory, look-ahead": (False, 2),
    "no look-ahead": (True, 0),
    "look-ahead": (True, 2),
}
"""Whether there are tiers, and depth."""


class Size(NamedTuple):
    """Of a run."""

    rows: int = 250_000
    batch: int = 4096
    """Of a rank."""
    share: float = 0.25
    """Of the bytes of rows and states that is in memory."""
    warm_up: int = 20
    steps: int = 40
    rounds: int = 4


QUICK = Size(4000, 64, 0.9, 2, 4, 1)


class Scores(nn.Module):
    """A small network over one vector of each table."""

    def __init__(self, rows: int, storage: Any) -> None:
        import hotbed as hb

        super().__init__()
        tables = [hb.Table(f"t{n}", DIM, rows) for n in range(TABLES)]
        self.embeddings = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        torch.manual_seed(0)
        self.top = nn.Sequential(nn.Linear(TABLES * DIM, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.embeddings({name: batch[name] for name in self.embeddings.features})
        return self.top(torch.cat([*vectors.values()], 1))[:, 0]


class Found(NamedTuple):
    """What a rank has measured, by mode."""

    ms: dict[str, list[float]]
    missed: dict[str, float]
    work: dict[str, list[tuple[float, float, float]]]
    """Seconds of `OtherWork` in each round."""


class _Run:
    """One model."""

    def __init__(self, size: Size, world: int, tiered: bool, depth: int, folder: Path) -> None:
        import hotbed as hb

        budget = int(size.share * TABLES * size.rows * RECORD / world)
        storage = hb.Storage(host=budget, ssd=folder) if tiered else None
        self.depth, self.model = depth, Scores(size.rows, storage)
        if world > 1:
            specs = self.model.embeddings.tables
            kinds = {name: hb.dist.RowWise() for name in specs}
            hb.distribute(self.model, hb.dist.Plan([*specs.values()], world, kinds))
        self.optimizer = hb.optim.Adagrad(self.model.parameters(), lr=LR)
        for name in self.model.embeddings.tables:
            write_all(self.model.embeddings, name, torch.arange(size.rows), zeros=True)

    def round(self, batches: list[dict[str, Tensor]], warm_up: int) -> float:
        """Return milliseconds a step."""
        import hotbed as hb

        feed: Any = hb.lookahead(batches, self.model, self.depth)
        began = 0.0
        for at, batch in enumerate(feed):
            if at == warm_up:
                began = time.perf_counter()
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch["label"])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - began) / (len(batches) - warm_up) * 1e3


def batches_of(size: Size, rank: int, world: int, count: int) -> list[dict[str, Tensor]]:
    rng = np.random.default_rng(0)
    many = size.batch * world * count
    ids = [
        rng.permutation(size.rows)[power_law_ranks(rng, many, size.rows, ALPHA)]
        for _ in range(TABLES)
    ]
    made = []
    for b in range(count):
        begin = size.batch * (b * world + rank)
        some = slice(begin, begin + size.batch)
        batch = {f"t{t}": torch.from_numpy(of[some].copy()) for t, of in enumerate(ids)}
        made.append({**batch, "label": (batch["t0"] % 2).float()})
    return made


def measure_rank(rank: int, world: int, size: Size, scratch: str) -> Found:
    """The modes in turn, with all ranks at the same one."""
    torch.set_num_threads(1)
    count = size.warm_up + size.steps
    every = batches_of(size, rank, world, size.rounds * count)
    runs = {
        mode: _Run(size, world, tiered, depth, Path(scratch) / mode.replace(" ", "-"))
        for mode, (tiered, depth) in MODES.items()
    }
    found = Found({mode: [] for mode in runs}, {}, {mode: [] for mode in runs})
    for number in range(size.rounds):
        batches = every[number * count : (number + 1) * count]  # others would all be resident
        for mode, one in runs.items():
            worlds.tell(f"{world} processes, round {number + 1}, {mode}")
            if world > 1:
                torch_dist.barrier()
            before = one.model.embeddings.stats()
            with OtherWork() as other:
                found.ms[mode].append(one.round(batches, size.warm_up))
            found.work[mode].append(other.seconds)
            after = one.model.embeddings.stats()
            missed = after["rows_missed"] - before["rows_missed"]
            found.missed[mode] = missed / len(batches)
    return found


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("tiers-ranks", quick)
    size = QUICK if quick else Size()
    disk = Path(os.environ.get("HOTBED_BENCH_DISK", tempfile.gettempdir()))
    for world in (1, 2):
        with tempfile.TemporaryDirectory(dir=disk) as scratch:
            found = worlds.run(world, measure_rank, size, scratch, progress=progress)
        _add(report, world, found)
    report.remarks += [
        f"{TABLES} tables of {size.rows:,} x {DIM} with Adagrad, cut by row, batch {size.batch:,} a rank, "
        f"power law {ALPHA}; {size.share:.0%} of the bytes of rows and states is in memory, every row was "
        "written to the log first.",
        "One training thread a process, and look-ahead's; a step takes as long as the slower rank takes.",
        "A ratio is steps a second with look-ahead over those without, in rounds that take turns.",
    ]
    return report


def _add(report: Report, world: int, found: list[Found]) -> None:
    named = f"{world} process{'es' * (world > 1)}"
    medians = {}
    for mode in MODES:
        slower = [max(times) for times in zip(*(one.ms[mode] for one in found), strict=True)]
        seconds = zip(*(one.work[mode] for one in found), strict=True)
        timing = Timing(slower, max(other_work([list(of) for of in every]) for every in seconds))
        report.add("hotbed", f"{named}, {mode}", timing)
        medians[mode] = statistics.median(slower)
        if MODES[mode][0]:
            missed = sum(one.missed[mode] for one in found)
            report.figures[f"{named}, {mode}: rows brought up a step"] = round(missed)
    for without, ahead in (
        ("in memory", "in memory, look-ahead"),
        ("no look-ahead", "look-ahead"),
    ):
        report.ratios[f"{named}: {ahead}/{without}"] = medians[without] / medians[ahead]
