"""`hotbed train` on a quiet machine and beside two busy processes, by how its threads wait for each other."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.train import click_log

SAMPLES, QUICK_SAMPLES = 20_000, 5_000
REPEATS = 3
BUSY_PROCESSES = 2
HOST = "16MB"
SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
VARIANTS: dict[str, dict[str, str]] = {
    "hotbed": {},
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
"""What is set for the command; nothing lets it choose itself."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of each (%(default)s)")


def run(*, quick: bool, progress: Callable[[str], None], repeats: int = REPEATS) -> Report:
    report = Report("busy", quick)
    samples = QUICK_SAMPLES if quick else SAMPLES
    repeats = 1 if quick else repeats
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path, source = click_log(folder, quick)
        log = _head(path, samples, folder / "head.tsv")
        places = {"in memory": [], f"--host {HOST} --ssd": ["--host", HOST, "--ssd", "rows"]}
        timings: dict[tuple[str, str, str], Timing] = {}
        speeds: dict[tuple[str, str, str], list[float]] = {}
        for number in range(repeats):
            for (place, options), busy in itertools.product(places.items(), (0, BUSY_PROCESSES)):
                for name, environment in VARIANTS.items():
                    progress(f"round {number + 1} of {repeats}: {place}, {busy} busy, {name}")
                    with _busy(busy), OtherWork() as other:
                        figures = _train(log, options, environment, folder)
                    case = (name, place, f"{busy} busy processes" if busy else "quiet")
                    timing = timings.setdefault(case, Timing())
                    timing.ms.append(figures["seconds"] * 1e3)
                    speeds.setdefault(case, []).append(figures["samples_per_second"])
                    if not busy:
                        timing.other_work = max(timing.other_work, other.share)
    for (name, place, load), timing in timings.items():
        report.add(name, f"{source}, {samples:,} samples, {place}, {load}", timing)
    for case, values in speeds.items():
        what = f"{case[1]}, {case[2]}, {case[0]}: samples a second"
        report.figures[what] = round(sorted(values)[len(values) // 2])
    return report


def _head(path: Path, samples: int, target: Path) -> Path:
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
        target.write_text("".join(itertools.islice(lines, samples)))
    return target


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that compute without end, while the block runs."""
    code = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(code) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _train(
    log: Path, options: list[str], environment: dict[str, str], folder: Path
) -> dict[str, float]:
    """The figures of one run of the installed command."""
    plain = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    figures = folder / "figures.json"
    subprocess.run(
        [
            *(str(Path(sys.executable).with_name("hotbed")), "train", "--data", str(log)),
            *("--test-fraction", "0", "--json", str(figures), *options),
            *(["--reset-ssd"] if options else []),
        ],
        env={**plain, **environment},
        cwd=folder,
        check=True,
        capture_output=True,
    )
    read: dict[str, float] = json.loads(figures.read_text())
    return read
