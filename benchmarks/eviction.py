"""Rows loaded again after they were evicted: Hotbed's residency, LRU, LFU and Belady's rule.

One cache holds a tenth of the distinct rows of all tables. First touches of a row, which no policy
avoids, are not counted. docs/internals/eviction.md discusses the results.

LRU and LFU see no future and hold one batch. LFU counts, for each row in the cache, the batches that
used it since it came in; ties leave by recency. "lfu, remembering" never forgets a count. Belady's
rule knows the whole trace, holds one batch, and evicts the row whose next use is farthest away.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.caches import (
    Fading,
    LeastFrequent,
    LeastRecent,
    Order,
    Rate,
    Trace,
    repeat_misses,
)
from benchmarks.machine import ROOT
from benchmarks.report import Report
from benchmarks.workload import power_law_ranks

BATCH = 512
SHARE = 0.1
DEPTH, HORIZON = 2, 32
HORIZONS = (1, 8, 16, 64)
TABLES, ROWS, ALPHA, BATCHES = 26, 50_000, 1.05, 268
DRIFT = 100
"""Pairs of rows of a table that trade places in each batch."""
QUICK_BATCHES = 60


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("eviction", quick)
    progress("making the traces")
    batches = QUICK_BATCHES if quick else BATCHES
    traces = [power_law(batches), power_law(batches, drift=DRIFT)]
    log = _real_log()
    if log is not None:
        traces.insert(0, criteo(log, QUICK_BATCHES if quick else None))
    else:
        report.remarks.append("The real log is not there: set HOTBED_SHARED.")
    for trace in traces:
        _compare(report, trace, progress)
        if not quick:
            _variants(report, trace, progress)
    report.remarks += [
        f"Figures: repeat misses. Ratios: those of Hotbed (depth {DEPTH}, horizon {HORIZON}) over "
        "the rival's.",
        f"Batches of {BATCH} samples, one cache for all {TABLES} tables, {SHARE:.0%} of the rows "
        "of the trace.",
    ]
    return report


def _compare(report: Report, trace: Trace, progress: Callable[[str], None]) -> None:
    capacity = int(SHARE * trace.rows)
    prefix = "" if trace.name == "criteo" else f"{trace.name}/"
    label = f"{trace.name}: "
    touched = len(np.unique(np.concatenate(trace.batches)))
    report.figures[label + "batches"] = len(trace.batches)
    report.figures[label + "rows"] = trace.rows
    report.figures[label + "first touches"] = touched
    progress(f"{trace.name}: hotbed")
    ours = through_residency(trace, capacity, DEPTH, HORIZON)
    report.figures[label + "hotbed"] = ours
    rivals: dict[str, tuple[Order, float]] = {
        "lru": (LeastRecent(trace.rows), 0),
        "lfu": (LeastFrequent(trace.rows), 0),
        "lfu, remembering": (LeastFrequent(trace.rows, remembers=True), 0),
        "belady": (LeastRecent(trace.rows), np.inf),
    }
    for name, (order, horizon) in rivals.items():
        progress(f"{trace.name}: {name}")
        theirs = repeat_misses(trace, capacity, order, horizon=horizon)
        report.figures[label + name] = theirs
        report.ratios[prefix + name] = ours / theirs


def _variants(report: Report, trace: Trace, progress: Callable[[str], None]) -> None:
    """What else the rows of unknown next use could leave by, and what the settings do."""
    capacity = int(SHARE * trace.rows)
    progress(f"{trace.name}: other horizons")
    for horizon in HORIZONS:
        depth = min(DEPTH, horizon)
        for what, ghosts in (("", 1.0), (", no ghosts", 0.0)):
            name = f"{trace.name}, horizon {horizon}, hotbed{what}"
            report.figures[name] = through_residency(trace, capacity, depth, horizon, ghosts=ghosts)
    for name, settings in (
        ("no ghosts", {"ghosts": 0.0}),
        ("4 ghosts a slot", {"ghosts": 4.0}),
        ("half-life 4", {"half_life": 4.0}),
        ("half-life 64", {"half_life": 64.0}),
        ("sweep 8 slots a victim", {"slots_a_victim": 8, "slots_a_batch": 0}),
    ):
        figure = through_residency(trace, capacity, DEPTH, HORIZON, **settings)
        report.figures[f"{trace.name}, horizon {HORIZON}, hotbed, {name}"] = figure
    orders: dict[str, Callable[[], Order]] = {
        "by recency": lambda: LeastRecent(trace.rows),
        "by count in the cache": lambda: LeastFrequent(trace.rows),
        "by count ever": lambda: LeastFrequent(trace.rows, remembers=True),
        "by count over age": lambda: Rate(trace.rows),
        "fading, half-life 16, in the cache": lambda: Fading(trace.rows, 16 * capacity, False),
        "fading, half-life 16, ever": lambda: Fading(trace.rows, 16 * capacity, True),
    }
    for name, make in orders.items():
        progress(f"{trace.name}: exact order {name}")
        figure = repeat_misses(trace, capacity, make(), depth=DEPTH, horizon=HORIZON)
        report.figures[f"{trace.name}, horizon {HORIZON}, exact order {name}"] = figure
    figure = repeat_misses(trace, capacity, LeastRecent(trace.rows), depth=DEPTH, horizon=np.inf)
    report.figures[f"{trace.name}, belady with {DEPTH} batches held"] = figure


def through_residency(
    trace: Trace, capacity: int, depth: int, horizon: int, **policy: float
) -> int:
    """Repeat misses of the core's Residency, driven as look-ahead drives it."""
    from hotbed import _core

    tables = int(trace.tables.max()) + 1
    residency = _core.Residency([-1] * tables, capacity, **policy)
    moves = _core.Moves()
    seen = np.zeros(trace.rows, bool)
    misses = announced = admitted = 0
    batches = len(trace.batches)
    for t in range(batches):
        while announced < min(t + max(horizon, depth), batches):
            parts = _by_table(trace, trace.batches[announced], tables)
            residency.announce([(i, ids.ctypes.data, len(ids)) for i, ids in enumerate(parts)])
            announced += 1
        while admitted < min(t + depth, batches):
            admitted += 1
            if not residency.admit(admitted, moves):
                raise ValueError(f"{moves.slots_needed} slots are needed, {capacity} are there")
            loaded_tables, loaded_ids, _ = moves.loaded
            loaded = trace.numbers(loaded_tables, loaded_ids)
            misses += int(seen[loaded].sum())
            seen[loaded] = True
        residency.consume(t + 1)
        residency.mark_dirty(t + 1)
        residency.release(t + 1)
    return misses


def _by_table(trace: Trace, keys: np.ndarray, tables: int) -> list[np.ndarray]:
    table, ids = trace.tables[keys], trace.ids[keys]
    return [np.ascontiguousarray(ids[table == t]) for t in range(tables)]


def _real_log() -> Path | None:
    root = os.environ.get("HOTBED_SHARED")
    shared = Path(root) if root else ROOT.parent / "shared"
    path = shared / "data" / "criteo" / "train.tsv.gz"
    return path if path.is_file() else None


def criteo(log: Path, batches: int | None) -> Trace:
    """The categorical columns of the log's first batches, in time order."""
    from hotbed.data import CATEGORIES, CriteoLog

    rows = None if batches is None else (0, batches * BATCH)
    columns: list[list[np.ndarray]] = [[] for _ in CATEGORIES]
    for batch in CriteoLog(log, 8192, rows=rows):
        for column, name in zip(columns, CATEGORIES, strict=True):
            column.append(batch[name].numpy())
    return _trace("criteo", [np.concatenate(column) for column in columns])


def power_law(batches: int, drift: int = 0, seed: int = 0) -> Trace:
    """Each table draws from a power law, in which `drift` pairs of rows trade places each batch."""
    rng = np.random.default_rng(seed)
    columns = []
    for _ in range(TABLES):
        ranks = power_law_ranks(rng, batches * BATCH, ROWS, ALPHA).reshape(batches, BATCH)
        row_of_rank = np.arange(ROWS)
        ids = np.empty_like(ranks)
        for b in range(batches):
            one, other = rng.permutation(ROWS)[: 2 * drift].reshape(2, drift)
            row_of_rank[one], row_of_rank[other] = row_of_rank[other], row_of_rank[one]
            ids[b] = row_of_rank[ranks[b]]
        columns.append(ids.ravel())
    return _trace("drifting" if drift else "power law", columns)


def _trace(name: str, columns: list[np.ndarray]) -> Trace:
    numbers, tables, ids = [], [], []
    base = 0
    for t, column in enumerate(columns):
        distinct, number = np.unique(column, return_inverse=True)
        numbers.append(number + base)
        tables.append(np.full(len(distinct), t))
        ids.append(distinct)
        base += len(distinct)
    samples = np.stack(numbers)
    batches = []
    for begin in range(0, samples.shape[1], BATCH):
        distinct, first = np.unique(samples[:, begin : begin + BATCH], return_index=True)
        batches.append(distinct[np.argsort(first)])
    return Trace(name, batches, base, np.concatenate(tables), np.concatenate(ids))
