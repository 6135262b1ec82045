"""How soon a server answers with what a training has learned."""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch

import hotbed as hb
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.servers import hotbed_serves

TABLES, DIM = 26, 16
ROWS, QUICK_ROWS = 384_615, 4_000
"""Of each table; 10 M in all."""
SHARE = 0.01
"""Of the rows that are trained before each checkpoint."""
TIMES = 7


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("serve-follow", quick)
    rows = QUICK_ROWS if quick else ROWS
    timings = {name: Timing() for name in ("saved", "served")}
    with tempfile.TemporaryDirectory() as scratch, OtherWork() as other:
        folder = Path(scratch)
        torch.manual_seed(0)
        names = [f"C{n}" for n in range(TABLES)]
        model = hb.models.DLRM([hb.Table(name, DIM, rows) for name in names])
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)

        def step(count: int) -> None:
            ids = {name: torch.randperm(rows)[:count] for name in names}
            model({"dense": torch.rand(count, 13), **ids}).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        progress("a model, exported")
        step(8)
        hb.save(folder / "run", model, optimizer, step=0)
        sample = {"dense": torch.rand(4, 13), **{name: torch.arange(4) for name in names}}
        hb.export(model, folder / "bundle", sample=sample, step=0)
        with hotbed_serves(folder / "bundle", "--follow", folder / "run") as server:
            for number in range(1, 3 if quick else TIMES + 1):
                progress(f"checkpoint {number} of {TIMES}")
                step(int(rows * SHARE))
                begun = time.perf_counter()
                hb.save(folder / "run", model, optimizer, step=number, delta=True)
                timings["saved"].ms.append((time.perf_counter() - begun) * 1e3)
                while not _version(server.port).startswith(f"{number}-"):
                    if time.perf_counter() - begun > 60:
                        raise RuntimeError("The server does not follow.")
                    time.sleep(0.02)
                timings["served"].ms.append((time.perf_counter() - begun) * 1e3)
    shape = f"DLRM of {TABLES} x {rows:,} x {DIM}, {SHARE:.0%} of its rows a checkpoint"
    for name, timing in timings.items():
        timing.other_work = other.share
        report.add(f"from a step until its rows are {name}", shape, timing)
    report.figures["longest from a step until it is served, ms"] = round(max(timings["served"].ms))
    report.remark("Training, follower and server are on the same cores.")
    return report


def _version(port: int) -> str:
    """Return the version that answers."""
    url = f"http://127.0.0.1:{port}/v1/models/bundle"
    with urllib.request.urlopen(url, timeout=10) as response:
        told = json.load(response)
    version: str = told["model_version_status"][0]["version"]
    return version
