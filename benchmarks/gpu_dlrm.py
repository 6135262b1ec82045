"""Scenarios `dlrm ...` of the GPU benchmark: the MLPerf DLRM, in GPU memory, over RAM and over SSD.

Row values do not matter to time, so tables start from zeros, which saves minutes of drawing them. Below
the device only the rows that some batch uses are written beforehand; others are only read, and start
from zeros when they are. The popular ones are brought up before anything is timed.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks.gpu_scenarios import Run, Scenario
from benchmarks.gpu_sizes import Sizes
from benchmarks.gpu_training import (
    ALPHA,
    GRAPHS,
    LOOK_AHEAD,
    Batch,
    add_counts,
    all_there,
    trained,
)
from benchmarks.measure import Timing
from benchmarks.tables import look_popular_up, write_all
from benchmarks.workload import least_step_bytes, power_law_ranks
from hotbed.trace import Trace

WHOLE = "dlrm, all in GPU memory"
SPARE = 64 << 20
PUBLISHED = (
    "dlrm: OneEmbedding states about 6 M samples/s with AMP on one A100-80GB; "
    "distributed-embeddings 768 k on one A100 with its large tables in RAM. Batches are drawn "
    "beforehand; those of the runs without tiers lie on the device."
)


def scenarios(sizes: Sizes) -> list[Scenario]:
    below = [(budget, "RAM") for budget in sizes.device_budgets]
    below.append((sizes.device_budgets[-1], "SSD"))
    tiered = [
        Scenario(
            _name(budget, over), functools.partial(_tiered, budget=budget, over=over), seconds=60
        )
        for budget, over in below
    ]
    return [Scenario(WHOLE, _in_gpu_memory, seconds=30), *tiered]


def _name(budget: int, over: str) -> str:
    return f"dlrm over {over}, {budget / 1e9:g} GB on the device"


def _in_gpu_memory(run: Run) -> None:
    run.report.remark(PUBLISHED)
    torch.set_float32_matmul_precision("high")
    sizes = run.sizes
    rows = run.fitting(sizes.rows, 4 * sizes.dim, run.device_room(), "dlrm")
    run.doing(f"{WHOLE}: making the model")
    model = _model(run, rows, None)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.01)
    for amp, how in ((False, "TF32"), (True, "AMP")):
        run.doing(f"{WHOLE}, {how}")
        there = [all_there(batch, run.device) for batch in _clicks(rows, sizes)]
        moved = _least_bytes(there[0], sizes)
        for graph, launched in GRAPHS.items():
            timing = trained(run, model, optimizer, iter(there), amp=amp, graph=graph)
            _add(run, f"{WHOLE}, {how}{launched}", timing, moved)


def _tiered(run: Run, budget: int, over: str) -> None:
    folder = Path(os.environ.get("HOTBED_BENCH_DISK", tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(dir=folder, prefix="hotbed-dlrm-") as scratch:
        _train_tiered(run, budget, over, Path(scratch))


def _train_tiered(run: Run, budget: int, over: str, folder: Path) -> None:
    run.report.remark(PUBLISHED)
    torch.set_float32_matmul_precision("high")
    sizes, name = run.sizes, _name(budget, over)
    # As in GPU memory, where the same tables are all there.
    rows = run.fitting(sizes.rows, 4 * sizes.dim, run.device_room(), "dlrm")
    run.doing(f"{name}: drawing batches")
    batches = {ahead: list(_clicks(rows, sizes, seed=1 + ahead)) for ahead in LOOK_AHEAD}
    used = _used(batches.values(), run.device)
    count = sum(map(len, used.values()))
    run.report.figures["dlrm in tiers: rows that the batches use"] = count
    moved = _least_bytes(batches[0][0], sizes)
    run.doing(f"{name}: making the model")
    written = int(count * (4 * sizes.dim + 64) * 1.1)
    if over == "RAM":
        storage = hb.Storage(device=budget, host=written + SPARE)
    else:
        free = shutil.disk_usage(folder).free
        if free < 2 * written + SPARE:
            run.report.skipped[name] = f"{free / 1e9:.0f} GB of disk are free at {folder.parent}"
            return
        # RAM holds the log's index and a quarter of what the batches use.
        host = 4 * sum(rows) + written // 4 + SPARE
        storage = hb.Storage(device=budget, host=host, ssd=folder / "rows")
        run.report.remark(f"{name}: {host / 1e9:.2g} GB of RAM, index included; the rest on SSD.")
    model = _model(run, rows, storage)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.01)
    for table, ids in used.items():
        run.doing(f"{name}: writing rows of {table}")
        write_all(model.embeddings, table, ids, zeros=True)
    # As after a long training: what comes takes the place of rows that are less popular.
    run.doing(f"{name}: bringing popular rows up")
    share = 0.95 * budget / (sum(rows) * (4 * sizes.dim + 16))
    counts = {f"t{t}": int(min(1, share) * n) for t, n in enumerate(rows)}
    look_popular_up(model.embeddings, counts, sizes.batch)
    rates = [run.report.figures.get(_rate(f"{WHOLE}, AMP{how}"), 0) for how in GRAPHS.values()]
    for ahead, mode in LOOK_AHEAD.items():
        label = f"{name}, AMP, {mode}"
        run.doing(label)
        stats = model.embeddings.stats()
        with Trace() as trace:
            timing = trained(run, model, optimizer, iter(batches[ahead]), amp=True, ahead=ahead)
        _add(run, label, timing, moved)
        if ahead:
            _add_what_binds(run, label, timing, trace, sizes.batch * len(rows))
        if any(rates):
            rate = run.report.figures[_rate(label)]
            run.report.ratios[f"{label} / all in GPU memory"] = rate / max(rates)
        add_counts(run, label, stats, model.embeddings.stats())
        if over == "SSD":
            read = model.embeddings.stats()["rows_from_ssd"] - stats["rows_from_ssd"]
            steps = sizes.warm_up + sizes.steps
            run.report.figures[f"{label}: rows read from SSD a step"] = round(read / steps)


def _add_what_binds(run: Run, label: str, timing: Timing, trace: Trace, ids: int) -> None:
    """What each thread had to do a step; the one that is busy all the time is what binds."""
    figures, step = run.report.figures, timing.median
    busy = {}
    for name in ("announce ids", "bring rows up"):
        count, total = trace.totals()[name]
        busy[name] = total / count
        figures[f"{label}: ms a step, {name}"] = round(busy[name], 2)
    figures[f"{label}: ids a second resolved by one core"] = round(ids / busy["announce ids"] * 1e3)
    most = max(busy, key=lambda name: busy[name])
    binds = most if busy[most] > 0.8 * step else "the training thread and the device"
    run.report.remark(
        f"{label}: of a step's {step:.1f} ms, look-ahead's threads work {busy['announce ids']:.1f} (ids) "
        f"and {busy['bring rows up']:.1f} (rows); what binds: {binds}."
    )


def _used(lists: Iterable[list[Batch]], device: torch.device) -> dict[str, Tensor]:
    """Table → the ids of all batches, each once."""
    batches = list(itertools.chain(*lists))
    names = [name for name in batches[0] if name not in ("dense", "label")]
    ids = {name: torch.cat([batch[name] for batch in batches]) for name in names}
    return {name: torch.unique(x.to(device)).cpu() for name, x in ids.items()}  # sorting takes long


def _least_bytes(batch: Batch, sizes: Sizes) -> float:
    """What the tables must move in GPU memory; the rest of the step is not in it."""
    tables = [name for name in batch if name not in ("dense", "label")]
    return least_step_bytes([(name, batch[name], sizes.dim) for name in tables], "sgd")


def _rate(label: str) -> str:
    return f"{label}: samples a second"


def _add(run: Run, label: str, timing: Timing, moved: float) -> None:
    run.add(f"{label}, batch {run.sizes.batch:,}", timing, moved)
    run.report.figures[_rate(label)] = round(run.sizes.batch / timing.median * 1e3)


def _model(run: Run, rows: tuple[int, ...], storage: hb.Storage | None) -> nn.Module:
    sizes = run.sizes
    torch.manual_seed(0)
    zeros = hb.init.Zeros()
    tables = [hb.Table(f"t{t}", sizes.dim, n, "sum", init=zeros) for t, n in enumerate(rows)]
    bottom = [*sizes.bottom, sizes.dim]
    return hb.models.DLRM(
        tables, sizes.dim, 13, bottom, sizes.top, seed=0, storage=storage, device=run.device
    )


def _clicks(rows: tuple[int, ...], sizes: Sizes, seed: int = 0) -> Iterator[Batch]:
    """As many batches as one training takes."""
    rng = np.random.default_rng(seed)
    for _ in range(sizes.warm_up + sizes.steps):
        batch: Batch = {
            f"t{t}": torch.from_numpy(power_law_ranks(rng, sizes.batch, n, ALPHA))
            for t, n in enumerate(rows)
        }
        batch["dense"] = torch.from_numpy(rng.random((sizes.batch, 13), np.float32))
        batch["label"] = torch.from_numpy(rng.integers(0, 2, sizes.batch).astype(np.float32))
        yield batch
