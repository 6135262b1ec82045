"""Resolve in a pool that holds part of the rows: distinct ids, look-ahead, slots; on one core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.workload import power_law_ranks

TABLES, BATCH, ALPHA = 26, 8192, 1.05
ROWS, QUICK_ROWS = 1_000_000, 100_000
HORIZON, DEPTH = 32, 2
BATCHES, QUICK_BATCHES = 48, 12
WARM_UP = 8
SHARES = (1.0, 0.25, 0.1)
TARGET = 8e6
"""Ids a second, counted before those that repeat are dropped."""

PHASES = ("distinct", "announce", "admit", "consume", "mark dirty", "release")


class Trace:
    """Batches of power-law ids, and of each the distinct ids in order of first appearance."""

    def __init__(self, rows: int, batches: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rows = rows
        # By falling frequency.
        self.ranked = [rng.permutation(rows) for _ in range(TABLES)]
        self.ids = np.empty((batches, TABLES, BATCH), np.int64)
        for t, ranked in enumerate(self.ranked):
            ranks = power_law_ranks(rng, batches * BATCH, rows, ALPHA)
            self.ids[:, t] = ranked[ranks].reshape(batches, BATCH)
        self.distinct = [[_first_appearances(ids) for ids in batch] for batch in self.ids]
        self.unique = sum(len(ids) for batch in self.distinct for ids in batch) / batches


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("resolve", quick)
    rows = QUICK_ROWS if quick else ROWS
    batches = QUICK_BATCHES if quick else BATCHES
    progress("drawing batches")
    trace = Trace(rows, WARM_UP + batches + HORIZON)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind in ("static", "dynamic"):
            for share in SHARES:
                progress(f"{kind} tables, {share:.0%} of the rows resident")
                _measure(report, trace, kind, share, batches)
    finally:
        torch.set_num_threads(threads)
    unique = trace.unique / (TABLES * BATCH)
    report.figures["distinct ids a batch, share"] = round(unique, 3)
    report.remarks += [
        f"Ratios: ids a second on one core, over {TARGET / 1e6:.0f} million. Ids are counted "
        "before those that repeat are dropped.",
        "distinct: what Batch.resolve does for static tables in memory, where a slot is an id.",
        f"Look-ahead: {DEPTH} batches resident, {HORIZON} known. Rows are not moved.",
    ]
    return report


def _measure(report: Report, trace: Trace, kind: str, share: float, batches: int) -> None:
    from hotbed import _core

    table_rows = [trace.rows if kind == "static" else -1] * TABLES
    capacity = int(share * TABLES * trace.rows)
    residency = _core.Residency(table_rows, capacity)
    moves = _core.Moves()
    _fill(residency, trace, capacity)
    tables = [
        _core.Table.make(f"t{t}", trace.rows, 1, _core.DType.f32, [(1, 0, 0, 0, 0, 0)], t, None)
        for t in range(TABLES)
    ]
    timings = {phase: Timing() for phase in (*PHASES, "resolve")}
    loads = 0
    first = residency.next_batch
    announced = admitted = 0
    ms: dict[str, float] = {}

    def timed(phase: str, work: Callable[..., object], *arguments: object) -> object:
        start = time.perf_counter()
        result = work(*arguments)
        ms[phase] += (time.perf_counter() - start) * 1e3
        return result

    with OtherWork() as other:
        for i in range(WARM_UP + batches):
            ms.update(dict.fromkeys(PHASES, 0.0))
            while announced < i + HORIZON:
                batch = _core.Batch.make(tables, _inputs(trace.ids[announced]))
                timed("distinct", batch.resolve, False, True, [])
                timed("announce", residency.announce, _parts(trace.distinct[announced]))
                announced += 1
            while admitted < i + DEPTH:
                if not timed("admit", residency.admit, first + admitted, moves):
                    raise AssertionError(f"{moves.slots_needed} slots are needed")
                admitted += 1
            timed("consume", residency.consume, first + i)
            timed("mark dirty", residency.mark_dirty, first + i)
            timed("release", residency.release, first + i)
            if i >= WARM_UP:
                for phase in PHASES:
                    timings[phase].ms.append(ms[phase])
                timings["resolve"].ms.append(sum(ms.values()))
                loads += moves.loads
    config = f"{kind}, {TABLES} x {trace.rows:,}, batch {BATCH} x 1, {share:.0%} resident"
    for phase, timing in timings.items():
        timing.other_work = other.share
        report.add(phase, config, timing, threads=1)
    rate = TABLES * BATCH / (timings["resolve"].median / 1e3)
    report.ratios[f"{kind}/{share:.0%}"] = rate / TARGET
    report.figures[f"{kind}, {share:.0%}: ids a second"] = round(rate)
    report.figures[f"{kind}, {share:.0%}: rows loaded a batch"] = round(loads / batches)
    report.figures[f"{kind}, {share:.0%}: bytes a slot"] = round(
        residency.memory_bytes() / capacity, 1
    )


def _fill(residency: Any, trace: Trace, capacity: int) -> None:
    """Makes the most frequent rows of each table resident, until the pool is full."""
    from hotbed import _core

    moves = _core.Moves()
    each = capacity // TABLES
    step = 10_000
    for begin in range(0, each, step):
        parts = [np.ascontiguousarray(r[begin : min(begin + step, each)]) for r in trace.ranked]
        batch = residency.admit_now(_parts(parts), moves)
        residency.consume(batch)
        residency.release(batch)


def _first_appearances(ids: np.ndarray) -> np.ndarray:
    distinct, first = np.unique(ids, return_index=True)
    return np.ascontiguousarray(distinct[np.argsort(first)])


def _parts(distinct: list[np.ndarray]) -> list[tuple[int, int, int]]:
    return [(t, ids.ctypes.data, len(ids)) for t, ids in enumerate(distinct)]


def _inputs(ids: np.ndarray) -> list[tuple[int, ...]]:
    """One id a bag, summed, as (table, combiner, ids, id bytes, count, offsets, fixed, ...)."""
    return [(t, 1, ids[t].ctypes.data, 8, BATCH, 0, 1, BATCH, 0) for t in range(TABLES)]
