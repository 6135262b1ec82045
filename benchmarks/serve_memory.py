"""Memory of a server: of one worker and of four, and rows that are four times what it may have."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks.disk import forget
from benchmarks.machine import OtherWork, family_of
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.servers import Served, ask, hotbed_serves
from benchmarks.serving_client import Asked, Told

DIM = 128
ROWS, QUICK_ROWS = 8_500_000, 20_000
"""Of the table; 4.35 GB."""
IDS = 26
"""Of a request."""
RATE = 300
EXPONENT = 1.05
"""Of Zipf's law, by which ids are asked for."""
SECONDS, QUICK_SECONDS = 15.0, 1.0
ROUNDS = 3
BODIES = 3000
WITHOUT_ROWS = 400_000_000
"""Bytes that a server takes without rows, and a quarter of the rows beside them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, help="of the disk to use (%(default)s: a temporary one)"
    )


def run(*, quick: bool, progress: Callable[[str], None], folder: Path | None = None) -> Report:
    report = Report("serve-memory", quick)
    rows, seconds = (QUICK_ROWS, QUICK_SECONDS) if quick else (ROWS, SECONDS)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bundle = Path(scratch) / "bundle"
        progress("a model, exported")
        _bundle(bundle, rows)
        _workers(report, bundle, rows, progress)
        _beyond(report, bundle, rows, seconds, progress)
    return report


class _Model(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        table = hb.Table("item", DIM, rows, init=hb.init.Uniform(-1, 1))
        self.vectors = hb.EmbeddingCollection([table])
        self.top = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.top(self.vectors(batch)["item"]).squeeze(1)


def _bundle(path: Path, rows: int) -> None:
    torch.manual_seed(0)
    hb.export(_Model(rows), path, sample={"item": torch.arange(8).reshape(4, 2)})


def _workers(report: Report, bundle: Path, rows: int, progress: Callable[[str], None]) -> None:
    """Tell what one worker and four have in memory when every row was asked for."""
    held: dict[int, float] = {}
    every = [_written(bundle, n, each) for n, each in enumerate(_all_ids(rows))]
    for workers in (1, 4):
        progress(f"{workers} workers, every row")
        with hotbed_serves(bundle, "--workers", workers, "--max-wait", 60) as server:
            for at in range(0, len(every), 40):
                asked = _asked(server, every[at : at + 40], 4, 0, 0.5)
                told = ask(asked)
                assert {*told["statuses"]} == {"200"}, told["statuses"]
            held[workers] = sum(_pss(pid) for pid in family_of(server.process)) / 1e9
        report.figures[f"GB in memory, {workers} workers"] = round(held[workers], 2)
    report.ratios["memory of four workers over that of one"] = round(held[4] / held[1], 3)
    report.remark(
        f"Workers: shares of pages (PSS) of all processes, the one that begins them with them, after all "
        f"{rows:,} rows of {DIM} float32 were asked for."
    )


def _all_ids(rows: int) -> Iterator[object]:
    """Yield requests that have every id once."""
    for at in range(0, rows, 80_000):
        ids = list(range(at, min(at + 80_000, rows)))
        yield {"inputs": [ids[n : n + 8000] for n in range(0, len(ids), 8000)]}


def _beyond(
    report: Report, bundle: Path, rows: int, seconds: float, progress: Callable[[str], None]
) -> None:
    """Tell what answers take where a quarter of the rows fits into memory."""
    ranks = np.random.default_rng(0)
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT
    cumulated = np.cumsum(weights / weights.sum())
    place = ranks.permutation(rows)  # frequent ones lie anywhere
    bodies = []
    for n in range(BODIES // (30 if report.quick else 1)):
        drawn = place[np.minimum(np.searchsorted(cumulated, ranks.random(IDS)), rows - 1)]
        bodies.append(_written(bundle, f"zipf-{n}", {"inputs": [drawn.tolist()]}))
    limit = WITHOUT_ROWS + rows * DIM * 4 // 4
    cases = {"all": (), "a quarter": ("--memory", max(limit, 500_000_000))}
    told: dict[str, list[Told]] = {name: [] for name in cases}
    noise = dict.fromkeys(cases, 0.0)
    for number in range(1, 2 if report.quick else ROUNDS + 1):
        for name, options in cases.items():
            progress(f"round {number} of {ROUNDS}: {name} of the rows in memory")
            forget(bundle)
            if name == "all":
                for file in (bundle / "tables").iterdir():
                    file.read_bytes()
            with hotbed_serves(bundle, *options) as server:
                half = len(bodies) // 2
                ask(_asked(server, bodies[:half], 32, RATE, seconds))  # what is frequent comes in
                with OtherWork(server.process) as other:
                    told[name].append(ask(_asked(server, bodies[half:], 32, RATE, seconds)))
                noise[name] = max(noise[name], other.share)
    p99: dict[str, float] = {}
    for name, rounds in told.items():
        timing = Timing([statistics.median(each["ms"]) for each in rounds], noise[name])
        shape = f"{IDS} of {rows:,} rows of {DIM}, Zipf {EXPONENT}, {RATE} requests/s"
        report.add(f"{name} of the rows in memory", shape, timing)
        p99[name] = statistics.median(float(np.percentile(each["ms"], 99)) for each in rounds)
        report.figures[f"{name} of the rows in memory: p99, ms"] = round(p99[name], 2)
        if wrong := {status for each in rounds for status in each["statuses"]} - {"200"}:
            report.failed[name] = f"answers with status {', '.join(sorted(wrong))}"
    report.ratios["p99 with a quarter over that with all"] = round(p99["a quarter"] / p99["all"], 2)
    report.remark(
        "Beyond memory: a control group holds the server to a quarter of the rows and "
        f"{WITHOUT_ROWS / 1e6:.0f} MB. Requests are different ones from those before."
    )


def _written(bundle: Path, name: object, body: object) -> str:
    file = bundle.parent / f"{name}.json"
    file.write_text(json.dumps(body))
    return str(file)


def _asked(
    server: Served, bodies: list[str], connections: int, rate: float, seconds: float
) -> Asked:
    return {
        "port": server.port,
        "path": "/v1/models/bundle:predict",
        "bodies": bodies,
        "connections": min(connections, len(bodies)),
        "rate": rate,
        "seconds": seconds,
        "once": not rate,
    }


def _pss(process: int) -> float:
    """Return bytes: its own, and its share of those that others have, too."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return float(line.split()[1]) * 1024
    return 0.0
