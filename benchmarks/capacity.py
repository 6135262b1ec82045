"""NVIDIA's synthetic model *small*, all of whose rows lie on SSD, trained in a few gigabytes."""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hotbed as hb
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.synthetic import OPTIMIZERS, Network, described_tables, drawn
from benchmarks.synthetic_models import SyntheticModel, synthetic_model
from benchmarks.tables import Counts, look_popular_up, write_all

BATCH = 4096
MEMORY = 6 * 10**9
"""Of the whole process: what it holds at most."""
BESIDE = int(1.6e9)
"""Python, torch, the dense part, batches and what a step needs for a moment."""
SPACE_RATIO = 1.15
SPARE_DISK = 3 * 10**9
DEPTH, HORIZON = 2, 4
WARM_UP, MEASURED = 24, 24
POPULAR_FROM = 10**6
"""Tables of at least so many rows have their most popular rows in memory before anything is timed."""
QUICK_ROWS, QUICK_BATCH, QUICK_MEMORY = 20_000, 256, 320 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="only tell what a model of 1 TB would need"
    )


def run(*, quick: bool, progress: Callable[[str], None], dry_run: bool = False) -> Report:
    report = Report("capacity", quick)
    progress("measuring what a row takes on disk and in memory")
    if dry_run:
        _of_a_terabyte(report)
        return report
    folder = Path(os.environ.get("HOTBED_BENCH_DISK", tempfile.gettempdir()))
    whole = synthetic_model("small")
    if quick:
        model = whole.scaled(QUICK_ROWS)
    else:
        model = _that_fits(report, whole, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="hotbed-capacity-") as scratch:
        _train(report, model, Path(scratch) / "rows", quick, progress)
    return report


def _that_fits(report: Report, whole: SyntheticModel, folder: Path) -> SyntheticModel:
    """The model, with fewer rows where the disk is too small."""
    free = shutil.disk_usage(folder).free
    needed = _disk_bytes(whole)
    said = f"The whole model needs {needed / 1e9:.0f} GB of disk; {free / 1e9:.0f} GB are free."
    scale = (free - SPARE_DISK) / needed
    if scale >= 1:
        report.remarks.append(said)
        return whole
    groups = tuple(
        replace(g, rows=int(g.rows * scale)) if g.rows >= 10**6 else g for g in whole.groups
    )
    report.remarks.append(
        f"{said} Scaled down: tables of a million rows and more have {scale:.0%} of their rows."
    )
    return replace(whole, groups=groups)


def _train(
    report: Report, description: SyntheticModel, folder: Path, quick: bool, progress: Any
) -> None:
    batch_size = QUICK_BATCH if quick else BATCH
    budget = QUICK_MEMORY if quick else MEMORY - BESIDE
    torch.manual_seed(0)
    storage = hb.Storage(host=budget, ssd=folder, space_ratio=SPACE_RATIO)
    model = Network(description, storage)
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    tables, _ = described_tables(description)
    start = time.perf_counter()
    for at, table in enumerate(tables):
        progress(f"writing table {at + 1} of {len(tables)}")
        write_all(model.embeddings, table.name, torch.arange(table.rows))
    model.embeddings.flush()
    report.figures["seconds to write every row"] = round(time.perf_counter() - start, 1)
    on_disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*.rows"))
    weights = 4 * description.parameters
    report.figures["tables"] = description.tables
    report.figures["rows"] = description.rows
    report.figures["weights, GiB"] = round(weights / 2**30, 2)
    report.figures["weights and states, GiB"] = round(2 * weights / 2**30, 2)
    report.figures["on disk before training, GB"] = round(on_disk / 1e9, 2)

    progress("looking popular rows up")
    _look_popular_up(model, tables, budget, batch_size)
    loss_of = nn.functional.binary_cross_entropy_with_logits
    warm_up, measured = (2, 4) if quick else (WARM_UP, MEASURED)
    timing, losses = Timing(), []
    seeds = range(warm_up + measured + 1)
    batches = (drawn(description, batch_size, seed) for seed in seeds)
    before: dict[str, float] = {}
    began: list[float] = []
    io = _disk_bytes_moved()
    progress("training")
    with OtherWork() as other:
        for i, batch in enumerate(hb.lookahead(batches, model, DEPTH, HORIZON)):
            if i == warm_up:
                before, io = model.embeddings.stats(), _disk_bytes_moved()
            began.append(time.perf_counter())
            if i == warm_up + measured:
                break
            loss = loss_of(model(batch), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    timing.ms = [(b - a) * 1e3 for a, b in itertools.pairwise(began[warm_up:])]
    timing.other_work = other.share
    after, moved = model.embeddings.stats(), _disk_bytes_moved()
    name = f"small, {description.rows:,} rows, Adagrad, batch {batch_size:,}"
    report.add("hotbed", name, timing)
    report.figures["samples a second"] = round(measured * batch_size / sum(timing.ms) * 1e3)
    counts = Counts.between(before, after)
    report.figures["ids a step"] = batch_size * description.lookups
    report.figures["rows a step"] = round(counts.used / measured)
    report.figures["rows read a step"] = round(counts.missed / measured)
    report.figures["hit rate"] = round(counts.hit_rate, 4)
    for what, a, b in zip(("read", "written"), io, moved, strict=True):
        report.figures[f"MB {what} a step"] = round((b - a) / measured / 1e6, 1)
    report.figures["initial loss"], report.figures["loss"] = losses[0], losses[-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.figures["peak RSS, GB"] = round(peak / 1e9, 3)
    report.figures["weights and states over peak RSS"] = round(2 * weights / peak, 1)
    report.remarks.append(
        f"Storage(host={budget:,}, ssd=...), look-ahead {DEPTH} batches deep; every row was written "
        "to SSD first, then the hot rows that the budget holds were looked up once, and "
        f"{WARM_UP} batches trained. Samples a second count everything, drawing the batches too. Rows "
        "that were only looked up leave first, so little is written until the budget is full of others."
    )


def _look_popular_up(model: Network, tables: list[hb.Table], budget: int, batch: int) -> None:
    """As many of the hot rows as the budget holds, the hottest last, as after a long training."""
    large = {table.name: table for table in tables if table.rows >= POPULAR_FROM}
    if not large:
        return
    share = 0.9 * budget / sum(table.rows * (8 * table.dim + 40) for table in large.values())
    counts = {name: int(min(1, share) * table.rows) for name, table in large.items()}
    look_popular_up(model.embeddings, counts, 16 * batch)


def _disk_bytes(model: SyntheticModel) -> int:
    rows: dict[int, int] = {}
    for group in model.groups:
        rows[group.dim] = rows.get(group.dim, 0) + group.tables * group.rows
    return int(sum(n * _bytes_a_row(8 * dim)[0] for dim, n in rows.items()) * SPACE_RATIO)


def _bytes_a_row(record_bytes: int, dynamic: bool = False) -> tuple[float, float]:
    """What a live row takes on disk and of the index in memory, as a small log tells."""
    from hotbed import _core

    rows = 1 << 22 if dynamic else 1 << 14
    ids = (
        np.random.default_rng(0).integers(-(2**63), 2**63 - 1, rows) if dynamic else np.arange(rows)
    )
    with tempfile.TemporaryDirectory() as folder:
        stores = [(record_bytes, [(0, "t", None if dynamic else rows)])]
        log = _core.RowLog.create(str(Path(folder) / "log"), stores)
        before = log.statistics()["memory_bytes"]
        step = 1 << 16 if dynamic else 1 << 13
        for begin in range(0, rows, step):
            some = ids[begin : begin + step]
            records = np.zeros((len(some), record_bytes), np.uint8)
            log.write(0, np.zeros(len(some), np.int32), some, records)
        log.flush()
        now = log.statistics()
        log.close()
    # A static table's index is there from the start.
    index = (now["memory_bytes"] - before) / rows if dynamic else 4.0
    return now["stores"][0]["live_bytes"] / rows, index


def _of_a_terabyte(report: Report) -> None:
    rows, dim = 10**9, 128
    record = 2 * 4 * dim
    on_disk, _ = _bytes_a_row(record)
    _, keyed = _bytes_a_row(16, dynamic=True)
    report.figures["rows"] = rows
    report.figures["weights and states, GB"] = rows * record / 1e9
    report.figures["live blocks on disk, GB"] = round(rows * on_disk / 1e9)
    for ratio in (1.15, 1.5):
        report.figures[f"disk with space_ratio={ratio}, GB"] = round(ratio * rows * on_disk / 1e9)
    report.figures["index in memory, static table, GB"] = rows * 4 / 1e9
    report.figures["index in memory, dynamic table, GB"] = round(rows * keyed / 1e9, 1)
    report.remarks.append(
        f"A model of {rows:,} ids x {dim} float32 with Adagrad. A row takes {on_disk:,.0f} bytes of "
        f"live blocks and {keyed:.1f} bytes of a dynamic table's index, as measured on a small log. "
        "Beside the index, memory is what Storage(host=) gives to rows that are in use. Nothing was "
        "trained."
    )


def _disk_bytes_moved() -> tuple[int, int]:
    """Read and written by this process, as the kernel counts it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counted = dict(line.split(": ") for line in lines)
    return int(counted["read_bytes"]), int(counted["write_bytes"])
