"""Checkpoints of a model larger than what it may take of memory, and of the same model in memory: against
what the disk can do, and against torch's way."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hotbed as hb
from benchmarks.disk import BLOCK, forget, read, took_ms, write
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from hotbed.checkpoint import load_model
from hotbed.data import CATEGORIES, write_criteo_tsv
from hotbed.models import DLRM
from hotbed.train.scoring import write_scores

DIM, HOST = 64, "1GB"
ROWS, QUICK_ROWS = 16_900_000, 400_000
"""Of all tables: 4.3 GB of weights."""
SAMPLES = 200_000
AT_ONCE = 1 << 16
ALLOWED_MB = 256
ROUNDS = 3
TIERS, MEMORY = f"in --host {HOST} --ssd", "in memory"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, help="of the disk to use (%(default)s: a temporary one)"
    )


def run(*, quick: bool, progress: Callable[[str], None], folder: Path | None = None) -> Report:
    report = Report("checkpoint", quick)
    rows = QUICK_ROWS if quick else ROWS
    nbytes = rows * (DIM * 4 + 8)
    report.figures["rows"] = rows
    report.figures["bytes of rows"] = nbytes
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        write_criteo_tsv(
            str(Path(scratch) / "clicks.tsv"), rows=SAMPLES // (20 if quick else 1), seed=0
        )
        for work in WORKS:
            progress(f"{work}: {rows:,} rows")
            with OtherWork() as other:
                found = _in_a_process(work, rows, Path(scratch))
            for name, (where, seconds) in found["ms"].items():
                report.add(
                    name,
                    f"{rows:,} rows of {DIM} float32 in 26 tables {where}",
                    Timing(seconds, other.share),
                )
            report.figures.update(found["mb"])
    medians = {row["name"]: row["median_ms"] for row in report.rows}
    writes, reads = medians["write a file, synced"], medians["read a file, cold"]
    for name, floor in (
        ("save from tiers", writes),
        ("save from memory", writes),
        ("load into memory, cold", reads),
        ("load into tiers, cold", reads),
    ):
        report.figures[f"{name}: share of the disk's rate"] = round(floor / medians[name], 3)
    report.ratios["torch/load, warm"] = (
        medians["torch.load, load_state_dict, warm"] / medians["load into memory, warm"]
    )
    for name in ("saving", "loading", "scoring"):
        added = report.figures[f"{name}: MB above the budget"]
        if added > ALLOWED_MB:
            report.failed[name] = f"{added} MB above the budget, and {ALLOWED_MB} are allowed"
    report.remark(
        "MB above the budget: the process's peak RSS, less what it had before the model and the "
        f"{HOST} of the budget that its rows take by then."
    )
    report.remark(
        "The disk's rate: a file of as many bytes, in blocks of 32 MiB; written and synced once, or read "
        "when the system has none of it in memory (cold; else warm)."
    )
    return report


def _in_a_process(work: str, rows: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.checkpoint", work, str(rows), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _resident_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(field)


class _Peak:
    """The most memory that a block has, above what rows may take and the process had."""

    def __init__(self, before: float) -> None:
        self._before = before
        self.mb = 0

    def __enter__(self) -> _Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return self

    def __exit__(self, *_: object) -> None:
        budget = hb.storage.parse_bytes(HOST) / 1e6
        self.mb = round(_resident_mb("VmHWM") - self._before - budget)


def _storage(folder: Path) -> hb.Storage:
    return hb.Storage(host=HOST, ssd=folder / "rows", reset=True)


def _disk(rows: int, folder: Path) -> dict[str, Any]:
    size, path = rows * (DIM * 4 + 8), folder / "disk" / "file"
    path.parent.mkdir()
    writes, reads = [], []
    write(path, BLOCK)
    for _ in range(ROUNDS):
        path.unlink(missing_ok=True)
        writes.append(took_ms(lambda: write(path, size)))
        forget(path.parent)
        reads.append(took_ms(lambda: read(path)))
    path.unlink()
    mb = {
        f"disk: MB/s {what}": round(size / 1e3 / statistics.median(took))
        for what, took in (("written", writes), ("read", reads))
    }
    return {
        "ms": {"write a file, synced": ("", writes), "read a file, cold": ("", reads)},
        "mb": mb,
    }


def _save(rows: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    before = _resident_mb("VmRSS")
    model = DLRM(CATEGORIES, DIM, seed=0, storage=_storage(folder))
    a_table = rows // len(CATEGORIES)
    values = torch.randn(AT_ONCE, DIM)
    for name, begin in itertools.product(CATEGORIES, range(0, a_table, AT_ONCE)):
        ids = torch.arange(begin, min(begin + AT_ONCE, a_table)) * 5 - 1
        model.embeddings.assign(name, ids, values[: len(ids)])
    model.embeddings.flush()
    ms = []
    with _Peak(before) as peak:
        for _ in range(ROUNDS):
            ms.append(took_ms(lambda: hb.save(folder / "saved", model, step=1, keep=1)))
    return {
        "ms": {"save from tiers": (TIERS, ms)},
        "mb": {"saving: MB above the budget": peak.mb},
    }


def _load(rows: int, folder: Path) -> dict[str, Any]:
    before = _resident_mb("VmRSS")
    ms: dict[str, list[float]] = {}
    with _Peak(before) as loading:
        for _ in range(ROUNDS):
            for kind in ("cold", "warm"):
                if kind == "cold":
                    forget(folder / "saved")
                begin = time.perf_counter()
                model: Any = load_model(folder / "saved", storage=_storage(folder))
                took = (time.perf_counter() - begin) * 1e3
                ms.setdefault(f"load into tiers, {kind}", []).append(took)
                assert model.embeddings.count() == rows // 26 * 26
                del model
    with _Peak(before) as scoring:
        scores = write_scores(
            str(folder / "saved"),
            [str(folder / "clicks.tsv")],
            str(folder / "scores.csv"),
            storage=_storage(folder),
        )
    ms[f"score {scores.rows:,} samples"] = [scores.seconds * 1e3]
    return {
        "ms": {name: (TIERS, each) for name, each in ms.items()},
        "mb": {
            "loading: MB above the budget": loading.mb,
            "scoring: MB above the budget": scoring.mb,
        },
    }


def _memory(rows: int, folder: Path) -> dict[str, Any]:
    model: Any = load_model(folder / "saved")
    ms: dict[str, list[float]] = {}

    def measure(name: str, work: Callable[[], Any]) -> None:
        ms.setdefault(name, []).append(took_ms(work))

    for _ in range(ROUNDS):
        measure("save from memory", lambda: hb.save(folder / "saved", model, step=2, keep=1))
        measure("load into memory, warm", lambda: hb.load(folder / "saved", model))
        forget(folder / "saved")
        measure("load into memory, cold", lambda: hb.load(folder / "saved", model))
    file = folder / "state.pt"
    torch.save(model.state_dict(), file)
    for _ in range(ROUNDS):
        measure(
            "torch.load, load_state_dict, warm",
            lambda: model.load_state_dict(torch.load(file, weights_only=True)),
        )
    file.unlink()
    return {"ms": {name: (MEMORY, each) for name, each in ms.items()}, "mb": {}}


WORKS = {"disk": _disk, "save": _save, "load": _load, "memory": _memory}

if __name__ == "__main__":
    work, rows, folder = sys.argv[1:]
    print(json.dumps(WORKS[work](int(rows), Path(folder))))
