"""One checkpoint made of a whole one and twenty of what has changed, against the disk."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hotbed as hb
from benchmarks.disk import BLOCK, forget, read, took_ms, write
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report

TABLES, DIM = 26, 64
ROWS, QUICK_ROWS = 650_000, 4_000
"""Of each table; 4.3 GB of weights in all."""
DELTAS = 20
SHARE = 0.01
"""Of the rows that are trained between two."""
ROUNDS = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, help="of the disk to use (%(default)s: a temporary one)"
    )


def run(*, quick: bool, progress: Callable[[str], None], folder: Path | None = None) -> Report:
    report = Report("merge", quick)
    rows = QUICK_ROWS if quick else ROWS
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _measure(report, rows, Path(scratch), progress)
    report.remark(
        f"A whole checkpoint and {DELTAS} of changes, SGD, {SHARE:.0%} of the rows before each. What is read "
        "is in no memory of the system; what is written is synced."
    )
    return report


def _measure(report: Report, rows: int, folder: Path, progress: Callable[[str], None]) -> None:
    last, size_read = _chain(rows, folder / "run", progress)
    timings: dict[str, Timing] = {}

    def time(name: str, work: Callable[[], object]) -> None:
        forget(folder)
        with OtherWork() as other:
            took = took_ms(work)
        timing = timings.setdefault(name, Timing())
        timing.ms.append(took)
        timing.other_work = max(timing.other_work, other.share)

    file, out = folder / "file", folder / "out"
    write(file, BLOCK)
    for number in range(1, 2 if report.quick else ROUNDS + 1):
        progress(f"round {number} of {ROUNDS}")
        step = f"step-{number}"
        time("merge", partial(hb.checkpoint.merge, last, out / step))
        size = sum(each.stat().st_size for each in (out / step).rglob("*") if each.is_file())
        time("write as many bytes", partial(write, file, size))
        write(file, size_read)
        time("read as many bytes", partial(read, file))
    shape = f"1 + {DELTAS} checkpoints of {TABLES} x {rows:,} x {DIM} float32"
    for name, timing in timings.items():
        report.add(name, shape, timing)
    medians = {name: timing.median for name, timing in timings.items()}
    report.figures["MB read"], report.figures["MB written"] = (
        round(size_read / 1e6),
        round(size / 1e6),
    )
    report.figures["merge: share of the disk's rate, of writing alone"] = round(
        medians["write as many bytes"] / medians["merge"], 3
    )
    report.figures["merge: share of the disk's rate, of reading and then writing"] = round(
        (medians["write as many bytes"] + medians["read as many bytes"]) / medians["merge"], 3
    )


def _chain(rows: int, run: Path, progress: Callable[[str], None]) -> tuple[str, int]:
    """Save a chain. Returns the last one, and the bytes of all."""
    tables = [hb.Table(f"t{n}", DIM, rows) for n in range(TABLES)]
    model: Any = hb.EmbeddingCollection(tables, seed=0)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    saved = hb.save(run, model, optimizer, step=0)
    size = saved.bytes
    for number in range(1, DELTAS + 1):
        progress(f"checkpoint {number} of {DELTAS}")
        ids = {name: torch.randperm(rows)[: int(rows * SHARE)] for name in model.tables}
        sum(vectors.sum() for vectors in model(ids).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = hb.save(run, model, optimizer, step=number, delta=True)
        size += saved.bytes
    return saved.path, size
