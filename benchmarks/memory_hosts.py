"""Steps and memory of a rank that trains beside a memory host, of two ranks, and of one process."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor

from benchmarks import worlds
from benchmarks.exchange import other_work
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report

TABLES, DIM, LR = 26, 64, 0.01


class Size(NamedTuple):
    """Of a run."""

    rows: int = 100_000
    batch: int = 4096
    """Of a rank that trains."""
    warm_up: int = 5
    steps: int = 20


QUICK = Size(2000, 64, 1, 2)
MODES = {"one process": (1, 0), "two ranks": (2, 0), "one rank, one memory host": (1, 1)}
"""Ranks that train, and memory hosts."""


class Found(NamedTuple):
    """What a rank has measured; steps only where it trains."""

    ms: list[float]
    rss: int
    """Bytes above those before the model was made."""
    work: tuple[float, float, float]
    """Seconds of `OtherWork`."""


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def batches_of(size: Size, rank: int, count: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(rank)
    shape = (size.batch, 1)
    return [
        {f"t{t}": torch.randint(0, size.rows, shape, generator=drawn) for t in range(TABLES)}
        for _ in range(count)
    ]


def measure_rank(rank: int, world: int, size: Size, trainers: int) -> Found:
    import hotbed as hb

    importlib.import_module("torch._dynamo")  # as the first optimizer of a process does

    batches = batches_of(size, rank, size.warm_up + size.steps)
    before = resident()
    tables = [hb.Table(f"t{t}", DIM, size.rows, sharding="row") for t in range(TABLES)]
    model: Any = hb.EmbeddingCollection(tables, seed=0, device="meta")
    hb.distribute(model, memory_host=rank >= trainers)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=LR)
    ms: list[float] = []
    with OtherWork() as other:
        if rank >= trainers:
            hb.dist.serve_rows(model, optimizer)
        else:
            for at, batch in enumerate(batches):
                begin = time.perf_counter()
                sum(vectors.sum() for vectors in model(batch).values()).backward()
                optimizer.step()
                optimizer.zero_grad()
                if at >= size.warm_up:
                    ms.append((time.perf_counter() - begin) * 1e3)
            hb.dist.release_hosts(model)
    found = Found(ms, resident() - before, other.seconds)
    torch_dist.barrier()
    return found


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("memory-hosts", quick)
    size = QUICK if quick else Size()
    medians = {}
    for mode, (trainers, hosts) in MODES.items():
        progress(mode)
        found = worlds.run(trainers + hosts, measure_rank, size, trainers)
        slower = [max(times) for times in zip(*(one.ms for one in found[:trainers]), strict=True)]
        report.add("hotbed", mode, Timing(slower, other_work([list(one.work) for one in found])))
        medians[mode] = statistics.median(slower) / trainers
        report.figures[f"{mode}: MB of the rank that trains"] = round(found[0].rss / 1e6)
        if hosts:
            report.figures[f"{mode}: MB of the memory host"] = round(found[-1].rss / 1e6)
    alone = medians["one process"]
    for mode, took in medians.items():
        report.ratios[f"samples a second: {mode}/one process"] = alone / took
    report.remarks += [
        f"{TABLES} tables of {size.rows:,} x {DIM} cut by row, Adagrad, batch {size.batch:,} of one id a "
        "rank that trains, uniform ids; one thread a process, through shared memory.",
        "MB: resident memory above that before the model was made.",
    ]
    return report
