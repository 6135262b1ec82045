"""A DLRM that answers requests, beside a server of torch and FastAPI."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

import hotbed as hb
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.servers import Served, ask, free_port, hotbed_serves, running
from benchmarks.serving_client import Asked, Told

TABLES, DIM = 26, 16
ROWS, QUICK_ROWS = 384_615, 4_000
"""Of each table; 10 M in all."""
BATCH = 512
RATE = 300
SECONDS, QUICK_SECONDS = 15.0, 1.0
ROUNDS = 5
BODIES = 40
"""Different requests."""
HOTBED, TORCH = "hotbed", "torch and FastAPI"


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("serve", quick)
    rows, seconds = (QUICK_ROWS, QUICK_SECONDS) if quick else (ROWS, SECONDS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        progress("a model, exported")
        ids = _bundle(folder / "bundle", rows)
        bodies = _bodies(folder, ids, rows)
        told: dict[tuple[str, str], list[Told]] = {}
        noise: dict[tuple[str, str], float] = {}
        for number in range(1, 2 if quick else ROUNDS + 1):
            for name, server in (("hotbed", _hotbed), ("torch", _torch)):
                progress(f"round {number} of {ROUNDS}: {name}")
                with server(folder, rows) as (served, path):
                    for what in ("one", "many"):
                        asked = _asked(what, served.port, path, bodies[name, what], seconds)
                        ask({**asked, "seconds": 1.0})
                        with OtherWork(served.process) as other:
                            found = ask(asked)
                        told.setdefault((name, what), []).append(found)
                        noise[name, what] = max(noise.get((name, what), 0.0), other.share)
    _report(report, told, noise, rows)
    return report


def _bundle(path: Path, rows: int) -> list[torch.Tensor]:
    """Export a model with so many rows in each dynamic table. Returns their ids."""
    torch.manual_seed(0)
    names = [f"C{n}" for n in range(TABLES)]
    model = hb.models.DLRM(names, dim=DIM)
    ids = [torch.randint(-(1 << 62), 1 << 62, (rows,)) for _ in names]
    for some in range(0, rows, 4096):
        batch = {name: each[some : some + 4096] for name, each in zip(names, ids, strict=True)}
        model({"dense": torch.rand(len(batch["C0"]), 13), **batch})
    sample = {name: each[:8] for name, each in zip(names, ids, strict=True)}
    hb.export(model, path, sample={"dense": torch.rand(8, 13), **sample})
    return ids


def _bodies(
    folder: Path, ids: list[torch.Tensor], rows: int
) -> Mapping[tuple[str, str], list[str]]:
    """Write requests of one sample and of many, with uniform ids, as both servers take them."""
    rng = np.random.default_rng(0)
    found: dict[tuple[str, str], list[str]] = {}
    for what, count in (("one", 1), ("many", BATCH)):
        for number in range(BODIES):
            dense = np.round(rng.random((count, 13)), 4).tolist()
            chosen = rng.integers(0, rows, (count, TABLES))
            of_each = {f"C{n}": ids[n][chosen[:, n]].tolist() for n in range(TABLES)}
            for name, body in (
                ("hotbed", {"inputs": {"dense": dense, **of_each}}),
                ("torch", {"dense": dense, "ids": chosen.tolist()}),
            ):
                file = folder / f"{name}-{what}-{number}.json"
                file.write_text(json.dumps(body))
                found.setdefault((name, what), []).append(str(file))
    return found


def _asked(what: str, port: int, path: str, bodies: list[str], seconds: float) -> Asked:
    one = what == "one"
    return {
        "port": port,
        "path": path,
        "bodies": bodies,
        "connections": 32 if one else 2,
        "rate": RATE if one else 0,
        "seconds": seconds,
        "once": False,
    }


@contextlib.contextmanager
def _hotbed(folder: Path, rows: int) -> Iterator[tuple[Served, str]]:
    with hotbed_serves(folder / "bundle") as server:
        yield server, "/v1/models/bundle:predict"


@contextlib.contextmanager
def _torch(folder: Path, rows: int) -> Iterator[tuple[Served, str]]:
    port = free_port()
    app = "benchmarks.peers.fastapi_server:app"
    arguments = ["--factory", "--port", str(port), "--log-level", "warning", "--no-access-log"]
    sizes = {"SIZES": f"{TABLES},{rows},{DIM}", "THREADS": str(torch.get_num_threads())}
    with running(
        [sys.executable, "-m", "uvicorn", app, *arguments], sizes, port, "/openapi.json"
    ) as process:
        yield Served(port, process), "/predict"


def _report(
    report: Report,
    told: Mapping[tuple[str, str], list[Told]],
    noise: Mapping[tuple[str, str], float],
    rows: int,
) -> None:
    shape = f"DLRM of {TABLES} x {rows:,} x {DIM}"
    p99: dict[str, float] = {}
    rate: dict[str, float] = {}
    for (name, what), rounds in told.items():
        label = HOTBED if name == "hotbed" else TORCH
        asked = f"a sample, {RATE} requests/s" if what == "one" else f"{BATCH} samples, 2 clients"
        timing = Timing([statistics.median(each["ms"]) for each in rounds], noise[name, what])
        report.add(label, f"{shape}: {asked}", timing)
        wrong = {status for each in rounds for status in each["statuses"]} - {"200"}
        if wrong:
            report.failed[f"{label}, {asked}"] = f"answers with status {', '.join(sorted(wrong))}"
        client = statistics.median(each["client_seconds"] / each["seconds"] for each in rounds)
        report.figures[f"{label}, {asked}: the clients' share of a core"] = round(client, 3)
        if what == "one":
            p99[name] = statistics.median(float(np.percentile(each["ms"], 99)) for each in rounds)
            report.figures[f"{label}: p99 of a sample, ms"] = round(p99[name], 2)
        else:
            rate[name] = statistics.median(
                len(each["ms"]) * BATCH / each["seconds"] for each in rounds
            )
            report.figures[f"{label}: samples/s in batches of {BATCH}"] = round(rate[name])
    report.ratios[f"{TORCH}/samples a second"] = round(rate["hotbed"] / rate["torch"], 2)
    report.ratios[f"{TORCH}/p99 of a sample"] = round(p99["torch"] / p99["hotbed"], 2)
    report.remark(
        "Clients and server are on the same cores. Tables are dynamic in Hotbed, whose ids are any, and "
        "static in torch; ids are uniform. A ratio above 1: Hotbed is better."
    )
