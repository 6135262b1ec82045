"""Checkpoints of what has changed against whole ones, and what a step takes to know it."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hotbed as hb
from benchmarks import over_ssd as on_disk
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.workload import power_law_ranks

TABLES, DIM = 26, 64
ROWS, QUICK_ROWS = 650_000, 4_000
"""Of each table; 4.3 GB of weights in all."""
SHARE = 0.01
"""Of the rows that are touched between two checkpoints."""
ROUNDS = 5
STEP_ROWS, BATCH, STEPS = 100_000, 4096, 150


def add_options(parser: argparse.ArgumentParser) -> None:
    on_disk.add_options(parser, "hold a quarter of the rows on an SSD, and time no steps")


def run(
    *,
    quick: bool,
    progress: Callable[[str], None],
    folder: Path | None = None,
    over_ssd: bool = False,
) -> Report:
    report = Report("deltas", quick)
    rows = QUICK_ROWS if quick else ROWS
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch)
        storage = on_disk.storage_for(TABLES * rows, DIM * 4, path) if over_ssd else None
        _saves(report, rows, path, progress, storage)
    where = (
        f"room for {on_disk.IN_MEMORY:.0%} of the rows in memory" if over_ssd else "rows in memory"
    )
    remark = f"Checkpoints: SGD, {where}, ids that do not repeat, each file synced; whole ones and deltas "
    remark += "in turns."
    if not over_ssd:
        _steps(report, 2000 if quick else STEP_ROWS, 10 if quick else STEPS, progress)
        remark += (
            " Steps: tables that have been saved, and know what has changed, and others, in turns."
        )
    report.remark(remark)
    return report


def _tables(rows: int, storage: hb.Storage | None = None) -> hb.EmbeddingCollection:
    tables = [hb.Table(f"t{n}", DIM, rows) for n in range(TABLES)]
    return hb.EmbeddingCollection(tables, seed=0, storage=storage)


def _saves(
    report: Report,
    rows: int,
    folder: Path,
    progress: Callable[[str], None],
    storage: hb.Storage | None,
) -> None:
    model = _tables(rows, storage)
    if storage is not None:
        on_disk.fill(model)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    touched = max(1, int(rows * SHARE))
    saved: dict[str, hb.checkpoint.Saved] = {}
    timings = {"whole": Timing(), "delta": Timing()}
    hb.save(folder / "run", model, optimizer, step=0, delta=True)
    for number in range(1, 2 if report.quick else ROUNDS + 1):
        for name, timing in timings.items():
            progress(f"round {number} of {ROUNDS}: {name}")
            _touch(model, optimizer, rows, touched)
            with OtherWork() as other:
                begin = time.perf_counter()
                saved[name] = hb.save(
                    folder / "run", model, optimizer, step=number, delta=name == "delta", keep=1
                )
                timing.ms.append((time.perf_counter() - begin) * 1e3)
            timing.other_work = max(timing.other_work, other.share)
    shape = f"{TABLES} x {rows:,} x {DIM} float32, {SHARE:.0%} of rows touched"
    for name, timing in timings.items():
        report.add(name, shape, timing)
        report.figures[f"{shape}: {name}, MB"] = round(saved[name].bytes / 1e6, 3)
    report.figures[f"{shape}: bytes of a delta over those of a whole one"] = round(
        saved["delta"].bytes / saved["whole"].bytes, 4
    )
    report.ratios[f"whole/delta: {shape}"] = timings["whole"].median / timings["delta"].median


def _touch(model: Any, optimizer: Any, rows: int, count: int) -> None:
    ids = {name: torch.randperm(rows)[:count] for name in model.tables}
    sum(vectors.sum() for vectors in model(ids).values()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _steps(report: Report, rows: int, steps: int, progress: Callable[[str], None]) -> None:
    for rule in ("SGD", "RowwiseAdagrad", "Adagrad"):
        progress(f"steps, {rule}")
        models = {name: _tables(rows) for name in ("unknown", "known")}
        optimizers = {
            name: getattr(hb.optim, rule)(model.parameters(), lr=0.01)
            for name, model in models.items()
        }
        with tempfile.TemporaryDirectory() as folder:
            hb.save(folder, models["known"], optimizers["known"], step=0)
        rng = np.random.default_rng(0)
        batches = [
            {
                name: torch.from_numpy(power_law_ranks(rng, BATCH, rows, 1.05))
                for name in models["known"].tables
            }
            for _ in range(16)
        ]
        gradients = {name: torch.randn(BATCH, DIM) for name in models["known"].tables}
        timings = {name: Timing() for name in models}
        with OtherWork() as other:
            for step in range(steps + 10):
                turn = [*models] if step % 2 else [*models][::-1]
                for name in turn:
                    begin = time.perf_counter()
                    vectors = models[name](batches[step % len(batches)])
                    torch.autograd.backward(
                        [*vectors.values()], [gradients[each] for each in vectors]
                    )
                    optimizers[name].step()
                    optimizers[name].zero_grad()
                    if step >= 10:
                        timings[name].ms.append((time.perf_counter() - begin) * 1e3)
        shape = f"step, {rule}, {TABLES} x {rows:,} x {DIM}, batch {BATCH}, power law 1.05"
        for name, timing in timings.items():
            timing.other_work = other.share
            report.add(name, shape, timing)
        pairs = zip(timings["known"].ms, timings["unknown"].ms, strict=True)
        report.figures[f"{shape}: median of known over unknown, step by step"] = round(
            statistics.median(known / unknown for known, unknown in pairs), 4
        )
