"""Saves that share files with the SSD, against writing as many bytes as were dirty, and whole ones."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hotbed as hb
from benchmarks import over_ssd
from benchmarks.disk import BLOCK, forget, took_ms, write
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report

TABLES, DIM, RECORD = 26, 64, 512
"""Rows with the states of Adagrad."""
ROWS, QUICK_ROWS = 752_000, 8_000
"""Of each table; 10 GB in all."""
DIRTY = 0.1
"""Share of the rows that are trained between two saves."""
STEPS = 30
HOST, QUICK_HOST = "3GB", "48MB"
ROUNDS = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, help="of the disk to use (%(default)s: a temporary one)"
    )


def run(*, quick: bool, progress: Callable[[str], None], folder: Path | None = None) -> Report:
    report = Report("linked", quick)
    rows = QUICK_ROWS if quick else ROWS
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _Measured(report, rows, Path(scratch), progress).all()
    report.remark(
        f"Over an SSD, with {QUICK_HOST if quick else HOST} of memory: {STEPS} steps with Adagrad train "
        f"{DIRTY:.0%} of the rows, others each time, then one save. A file of as many bytes as these rows "
        "have with their states is written and synced before it; each file of a checkpoint is synced, too."
    )
    report.remark("Loads: into a new model over the SSD, when the system has no file in memory.")
    return report


class _Measured:
    def __init__(
        self, report: Report, rows: int, folder: Path, progress: Callable[[str], None]
    ) -> None:
        self.report, self.rows, self.folder, self.progress = report, rows, folder, progress
        self.shape = f"{TABLES} x {rows:,} x {DIM} float32 with Adagrad, {DIRTY:.0%} of rows dirty"
        self.rounds = 2 if report.quick else ROUNDS
        self.timings: dict[str, Timing] = {}

    def all(self) -> None:
        model, optimizer = self.made("a")
        self.progress("storing all rows")
        over_ssd.fill(model)
        model.flush()
        write(self.folder / "file", BLOCK)
        written = 0.0
        for number in range(1, self.rounds + 1):
            self.progress(f"round {number} of {self.rounds}")
            size = TABLES * int(self.rows * DIRTY) * RECORD
            self.train(model, optimizer)
            self.time("write a file, synced", partial(write, self.folder / "file", size))
            os.sync()
            time.sleep(1)  # until the system has done what is left of it
            before = model.stats()["rows_to_ssd"]
            self.time("linked save", partial(self.save, model, optimizer, linked=True))
            written += model.stats()["rows_to_ssd"] - before
        self.report.figures["rows that a linked save writes to the SSD"] = round(
            written / self.rounds
        )
        for _ in range(min(3, self.rounds)):
            self.train(model, optimizer)
            self.time("whole save", partial(self.save, model, optimizer, linked=False))
        del model, optimizer
        self.loads()
        for name, timing in self.timings.items():
            self.report.add(name, self.shape, timing)
        medians = {name: timing.median for name, timing in self.timings.items()}
        self.report.figures["time of a linked save, over that of writing as many bytes"] = round(
            medians["linked save"] / medians["write a file, synced"], 3
        )
        self.report.ratios["whole save/linked save"] = (
            medians["whole save"] / medians["linked save"]
        )
        self.report.ratios["load of a whole one/of a linked one"] = (
            medians["load of a whole one"] / medians["load of a linked one"]
        )

    def made(self, name: str) -> tuple[Any, Any]:
        tables = [hb.Table(f"t{n}", DIM, self.rows) for n in range(TABLES)]
        host = QUICK_HOST if self.report.quick else HOST
        storage = hb.Storage(host=host, ssd=self.folder / name, reset=True)
        model = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        return model, hb.optim.Adagrad(model.parameters(), lr=0.01)

    def train(self, model: Any, optimizer: Any) -> None:
        count = int(self.rows * DIRTY)
        chosen = {name: torch.randperm(self.rows)[:count] for name in model.tables}
        parts = {name: ids.tensor_split(STEPS) for name, ids in chosen.items()}
        for step in range(STEPS):
            vectors = model({name: of_table[step] for name, of_table in parts.items()})
            sum(each.sum() for each in vectors.values()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def save(self, model: Any, optimizer: Any, *, linked: bool) -> None:
        run = self.folder / ("linked" if linked else "whole")
        hb.save(run, model, optimizer, step=1, keep=1, linked=linked)

    def loads(self) -> None:
        """Loads of the latest of each kind, and packing the linked one."""
        for kind in ("linked", "whole"):
            for _ in range(min(3, self.rounds)):
                self.progress(f"loading a {kind} one")
                model, optimizer = self.made("b")
                forget(self.folder)
                load = partial(hb.load, self.folder / kind, model, optimizer)
                self.time(f"load of a {kind} one", load)
                del load
                del model, optimizer
        self.progress("packing")
        forget(self.folder)
        self.time("pack", partial(hb.checkpoint.pack, self.folder / "linked"))

    def time(self, name: str, work: Callable[[], object]) -> None:
        timing = self.timings.setdefault(name, Timing())
        with OtherWork() as other:
            timing.ms.append(took_ms(work))
        timing.other_work = max(timing.other_work, other.share)
