"""A training step over hundreds of small tables, in one process and on two ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

from benchmarks import worlds
from benchmarks.exchange import Measured, other_work
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report

TABLES, QUICK_TABLES = (100, 400, 800), (20, 40)
ROWS, DIM, BATCH = 230, 16, 64
WORLD = 2
WARM_UP, ITERATIONS, QUICK_ITERATIONS = 3, 20, 3
BATCHES = 4
FIRST, LATER = "first step", "later step"


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("scale-tables", quick)
    for tables in QUICK_TABLES if quick else TABLES:
        medians: dict[int, float] = {}
        for world in (1, WORLD):
            progress(f"{tables} tables, {world} processes")
            iterations = QUICK_ITERATIONS if quick else ITERATIONS
            found = worlds.run(world, measure_rank, tables, iterations)
            shape = f"{tables} static tables x {ROWS} x {DIM}, Adagrad, batch {BATCH} a process"
            for phase in (FIRST, LATER):
                slower = [max(all_) for all_ in zip(*(f.ms[phase, ""] for f in found), strict=True)]
                timing = Timing(slower, other_work([f.work[LATER] for f in found]))
                report.add(phase, f"{world} process{'es' * (world > 1)}, {shape}", timing)
            medians[world] = timing.median
        report.ratios[f"{tables} tables, a step on {WORLD} ranks over one process"] = (
            medians[WORLD] / medians[1]
        )
    report.remarks.append(
        "One thread a process, each with as many samples; a step takes as long as the slower rank takes."
    )
    return report


def measure_rank(rank: int, world: int, tables: int, iterations: int) -> Measured:
    import hotbed as hb

    model = hb.EmbeddingCollection([hb.Table(f"t{n}", DIM, ROWS) for n in range(tables)], seed=1)
    if world > 1:
        hb.distribute(model)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.01)
    drawn = torch.Generator().manual_seed(rank)
    batches: list[dict[str, Any]] = [
        {name: torch.randint(ROWS, (BATCH,), generator=drawn) for name in model.tables}
        for _ in range(BATCHES)
    ]
    measured = Measured()

    def step(number: int, phase: str | None) -> None:
        torch_dist.barrier()
        begin = time.perf_counter()
        outputs = [*model(batches[number % BATCHES]).values()]
        torch.autograd.backward(outputs, outputs)
        optimizer.step()
        optimizer.zero_grad()
        if phase is not None:
            measured.note(phase, {"": (time.perf_counter() - begin) * 1e3})

    step(0, FIRST)
    for number in range(WARM_UP):
        step(number, None)
    gc.collect()
    gc.disable()
    with OtherWork() as other:
        for number in range(iterations):
            step(number, LATER)
    measured.note_work(LATER, other)
    return measured
