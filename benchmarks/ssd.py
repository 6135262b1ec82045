"""Training reads and write-backs of rows on SSD: Hotbed's row log, RocksDB and LMDB."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, OtherWork
from benchmarks.measure import Timing
from benchmarks.memory_limit import MemoryLimit
from benchmarks.report import Report
from benchmarks.ssd_worker import CONTENDERS, contender_class

ROWS, QUICK_ROWS = 8_000_000, 100_000
BATCH, QUICK_BATCH = 20_000, 2_000
RECORD_BYTES = 512
"""64 float32 weights and as many of an Adagrad state."""
MEMORY_SHARE = 0.1
LEAST_MEMORY = 160 << 20
"""What a contender itself takes; more than the share only with --quick."""
AGE = 0.75
"""Rows overwritten before anything is measured, over all rows (in LMDB, whose tree does not depend on
it and which takes seconds a batch, a tenth of them)."""
ROUNDS, BATCHES = 3, 10


def memory_of(rows: int) -> int:
    return max(LEAST_MEMORY, int(MEMORY_SHARE * rows * RECORD_BYTES))


class Process:
    """A contender in a process of its own, under a limit on memory."""

    def __init__(self, name: str, folder: Path, rows: int, batch: int) -> None:
        memory = memory_of(rows)
        self.limit = MemoryLimit(name, memory)
        settings = {
            "name": name,
            "folder": str(folder / name),
            "rows": rows,
            "record_bytes": RECORD_BYTES,
            "batch": batch,
            "memory": memory,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ssd_worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "MALLOC_ARENA_MAX": "2",  # else memory grows with RocksDB's reading threads
            },
        )
        self._answer()
        self.limit.enter(self.process.pid)

    def __call__(self, command: str, *arguments: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contender ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.limit.remove()


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("ssd", quick)
    rows, batch = (QUICK_ROWS, QUICK_BATCH) if quick else (ROWS, BATCH)
    folder = Path(tempfile.mkdtemp(prefix="hotbed-ssd-", dir=os.environ.get("HOTBED_BENCH_DIR")))
    processes: dict[str, Process] = {}
    try:
        for name in CONTENDERS:
            missing = contender_class(name).lacks()
            if missing:
                report.remarks.append(missing)
                continue
            progress(f"filling {name}")
            process = processes[name] = Process(name, folder, rows, batch)
            report.figures[f"{name}: seconds to fill"] = round(process("fill")["seconds"], 1)
            progress(f"overwriting rows of {name}")
            process("age", 1_000_000, int(contender_class(name).ages * AGE * rows / batch))
            process("tune", 2_000_000)
        taken = _measure(processes, progress)
        _tell(report, taken, rows, batch)
        _explain(report, processes, rows)
    finally:
        for process in processes.values():
            process.end()
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _measure(
    processes: dict[str, Process], progress: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Batches of each contender in turn, and how long it then takes until nothing is left to do in
    the background: flushes, compaction, write-back of pages. That is shared out among the batches.
    """
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    for turn in range(ROUNDS):
        for name, process in processes.items():
            progress(f"round {turn + 1} of {ROUNDS}: {name}")
            process("run", 10_000 * turn)  # warms up
            with OtherWork() as other:
                answers = [process("run", 10_000 * turn + 1 + i) for i in range(BATCHES)]
            for answer in answers:
                # The contender is another process, so its own work counts as other's here.
                answer["other_work"] = other.share
            start = time.perf_counter()
            process("settle")
            settled = (time.perf_counter() - start) * 1e3 / BATCHES
            taken[name] += [{**answer, "settle_ms": settled} for answer in answers]
    return taken


def _tell(report: Report, taken: dict[str, list[dict[str, Any]]], rows: int, batch: int) -> None:
    config = f"{rows:,} rows of {RECORD_BYTES} bytes, {batch:,} distinct rows a batch"

    def timing(name: str, *parts: str) -> Timing:
        return Timing([sum(answer[part] for part in parts) for answer in taken[name]])

    disk = timing("hotbed", "disk_ms")
    report.add("disk, random 4 KiB reads", f"{config}: read", disk)
    for name in taken:
        report.add(name, f"{config}: read", timing(name, "read_ms"))
    for name in taken:
        report.add(name, f"{config}: write back", timing(name, "write_ms"))
    for name in taken:
        report.add(name, f"{config}: read and write back", timing(name, "read_ms", "write_ms"))
    for name in taken:
        report.add(
            name,
            f"{config}: with what is left to do",
            timing(name, "read_ms", "write_ms", "settle_ms"),
        )
    ours = timing("hotbed", "read_ms", "write_ms")
    ours_in_all = statistics.mean(timing("hotbed", "read_ms", "write_ms", "settle_ms").ms)
    for name in taken:
        if name == "hotbed":
            continue
        whole = timing(name, "read_ms", "write_ms")
        report.ratios[f"{name}/read and write back"] = whole.median / ours.median
        report.ratios[f"{name}/read"] = (
            timing(name, "read_ms").median / timing("hotbed", "read_ms").median
        )
        in_all = timing(name, "read_ms", "write_ms", "settle_ms")
        report.ratios[f"{name}/with what is left to do"] = statistics.mean(in_all.ms) / ours_in_all
    shares = [answer["disk_ms"] / answer["read_ms"] for answer in taken["hotbed"]]
    report.ratios["share of the disk's rate/read"] = statistics.median(shares)
    shares = [a["disk_ms"] / (a["read_ms"] + a["write_ms"]) for a in taken["hotbed"]]
    report.ratios["share of the disk's rate/read and write back"] = statistics.median(shares)
    report.figures["disk: random 4 KiB reads a second"] = round(batch / disk.median * 1e3)
    for name in taken:
        whole = timing(name, "read_ms", "write_ms").median
        report.figures[f"{name}: rows a second, read"] = round(
            batch / timing(name, "read_ms").median * 1e3
        )
        report.figures[f"{name}: rows a second, read and write back"] = round(batch / whole * 1e3)
        report.figures[f"{name}: processor µs a row read"] = round(
            statistics.median(answer["read_cpu_us"] for answer in taken[name]), 2
        )
    report.figures["disk: processor µs a read"] = round(
        statistics.median(answer["disk_cpu_us"] for answer in taken["hotbed"]), 2
    )


def _explain(report: Report, processes: dict[str, Process], rows: int) -> None:
    memory = memory_of(rows)
    kinds = {process.limit.kind for process in processes.values()}
    report.remarks.append(
        f"Each contender had {memory / 1e6:.0f} MB ({memory / (rows * RECORD_BYTES):.0%} of the rows), "
        f"page cache included ({', '.join(sorted(kinds))}); what Python and its modules took before is "
        "not in it."
        if "" not in kinds
        else "No control group could be made, so memory was not limited: LMDB had the page cache to "
        "itself, which favours it; the others read past it."
    )
    for name, process in processes.items():
        report.remarks.append(f"{name}: {process('settings')['settings']}.")
    report.remarks.append(
        "Nothing is synced for a batch. The disk's own rate was measured on the segments of the row "
        "log, right before each of its batches, by as many reads, 64 or 128 at a time. A share of "
        "that rate above 1 is due to rows that lie in neighbouring blocks."
    )
