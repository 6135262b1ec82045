"""A DLRM step whose tables and states are larger than the memory they may take."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.tables import Counts, write_all
from benchmarks.workload import power_law_ranks

TABLES, ROWS, DIM, BATCH = 26, 1_000_000, 64, 8192
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)
ALPHA = 1.05
DEPTH, HORIZON = 2, 32
WARM_UP, WARM_UP_IN_MEMORY = 64, 4
"""Batches before what is measured, in the mode that is measured. In 64 batches two thirds of a tenth of
the rows are replaced."""
MEASURED = 24
QUICK = {"rows": 20_000, "batch": 1024, "measured": 6}
DISK_READS = 40_000
LR = 0.01


class Model(nn.Module):
    """Bottom 13-512-256-64, pairwise products, top 512-256-1."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        import hotbed as hb

        self.embeddings = embeddings
        self.bottom = hb.nn.MLP(13, [512, 256, DIM], final_activation="relu")
        self.interaction = hb.nn.DotInteraction()
        self.top = hb.nn.MLP(self.interaction.out_features(TABLES, DIM), [512, 256, 1])

    def forward(self, batch: dict[str, Any]) -> Tensor:
        dense = self.bottom(batch["dense"])
        return self.top(self.interaction(dense, self.embeddings(batch["ids"]))).squeeze(1)


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("tiers", quick)
    rows = QUICK["rows"] if quick else ROWS
    batch = QUICK["batch"] if quick else BATCH
    measured = QUICK["measured"] if quick else MEASURED
    folder = Path(os.environ.get("HOTBED_BENCH_DISK", tempfile.gettempdir()))
    record = 2 * DIM * 4
    needed = int(2.2 * TABLES * rows * record)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"The tiers scenario needs {needed / 1e9:.0f} GB of disk at {folder} and "
            f"{free / 1e9:.0f} GB are free. Name another place in "
            "HOTBED_BENCH_DISK, or run it with --quick."
        )
    progress("making batches")
    clicks = Clicks(rows, batch)
    batches = clicks.batches(2 * (WARM_UP + measured) + HORIZON + 2)
    report.figures["bytes of rows and states"] = TABLES * rows * record

    base = _measure(None, rows, batches, measured, False, progress)
    config = f"{TABLES} x {rows:,} x {DIM}, Adagrad, batch {batch}"
    report.add("hotbed", f"{config}, all in memory", base["timing"])
    for share in SHARES:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # 100 % holds every row with its bookkeeping. The index of the log and what is on its way
            # are not rows, and are needed at any share.
            budget = int(share * TABLES * rows * (record + 40))
            budget += int(TABLES * rows * 6) + (160 << 20)
            run_of = _Tiered(budget, Path(scratch) / "rows", clicks, progress, share)
            run_of.build()
            reads = run_of.disk_reads_per_second()
            report.figures[f"{share:.0%}: random 4 KiB reads a second of the disk"] = round(reads)
            fresh = iter(batches)
            for ahead in (False, True):
                found = _measure(run_of, rows, fresh, measured, ahead, progress)
                name = f"{share:.0%}"
                mode = "look-ahead" if ahead else "no look-ahead"
                report.add("hotbed", f"{config}, {name} of memory, {mode}", found["timing"])
                suffix = "" if ahead else "/no look-ahead"
                ratio = base["timing"].median / found["timing"].median
                report.ratios[f"{name}{suffix}"] = ratio
                report.figures[f"{name}{suffix}: rows brought up a step"] = found["missed"]
                report.figures[f"{name}{suffix}: hit rate"] = found["hit_rate"]
                report.figures[f"{name}{suffix}: CPU ms a step"] = found["cpu_ms"]
                bound = max(
                    found["missed"] / reads * 1e3,
                    (base["cpu_ms"] + found["missed"] * CPU_MS_A_READ) / (os.cpu_count() or 1),
                    base["timing"].median,
                )
                report.figures[f"{name}{suffix}: bound"] = base["timing"].median / bound
                share_of_bound = bound / found["timing"].median
                report.figures[f"{name}{suffix}: share of the bound"] = share_of_bound
            run_of.close()
    gain = report.ratios["10%"] / report.ratios["10%/no look-ahead"]
    report.ratios["look-ahead over none at 10%"] = gain
    report.remarks.append(
        "A ratio is rows a second over those of the run with all rows in memory. The bound of a step "
        "is the largest of: its reads at the disk's random rate, measured on the log itself; (CPU of "
        f"the run in memory + reads x {CPU_MS_A_READ * 1e3:g} us) shared by all cores; the step in "
        "memory."
    )
    report.remarks.append(
        "Every row was written to the log first, in the order of rising popularity. Then the most "
        f"popular rows that the budget holds were looked up once, and {WARM_UP} batches trained in each "
        "mode before it was measured; no batch comes twice."
    )
    report.figures["peak RSS, bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return report


CPU_MS_A_READ = 2e-3
"""What a read costs at least. (`ssd` measures 3e-3, which would make the bound lower.)"""


class Clicks:
    """Power-law ids over a random permutation of each table's rows."""

    def __init__(self, rows: int, batch: int) -> None:
        self.rows, self.batch = rows, batch
        self.rng = np.random.default_rng(0)
        self.by_popularity = [self.rng.permutation(rows) for _ in range(TABLES)]

    def batches(self, count: int) -> list[dict[str, Any]]:
        ids = [
            ids[power_law_ranks(self.rng, count * self.batch, self.rows, ALPHA)]
            for ids in self.by_popularity
        ]
        generator = torch.Generator().manual_seed(1)
        return [
            {
                "dense": torch.randn(self.batch, 13, generator=generator),
                "ids": {
                    f"t{t}": torch.from_numpy(ids[t][b * self.batch : (b + 1) * self.batch])
                    for t in range(TABLES)
                },
                "label": torch.randint(0, 2, (self.batch,), generator=generator).float(),
            }
            for b in range(count)
        ]

    def popular(self, share: float) -> Iterator[dict[str, torch.Tensor]]:
        """The most popular rows of every table in parts; the most popular of them last."""
        count = int(share * self.rows)
        rows = [ids[:count][::-1] for ids in self.by_popularity]
        for begin in range(0, count, self.batch):
            yield {
                f"t{t}": torch.from_numpy(rows[t][begin : begin + self.batch].copy())
                for t in range(TABLES)
            }


class _Tiered:
    """Collections within one budget, one after the other, all rows of each written beforehand."""

    def __init__(
        self,
        budget: int,
        folder: Path,
        clicks: Clicks,
        progress: Callable[[str], None],
        share: float,
    ) -> None:
        self.budget, self.folder, self.clicks = budget, folder, clicks
        self.progress, self.share = progress, share
        self.made: tuple[Model, Any] | None = None

    def build(self) -> tuple[Model, Any]:
        import hotbed as hb

        if self.made is None:
            storage = hb.Storage(host=self.budget, ssd=self.folder)
            model, optimizer = _model(self.clicks.rows, storage)
            for t in range(TABLES):
                self.progress(f"{self.share:.0%} of memory: writing table {t + 1} of {TABLES}")
                # The most popular last: so they lie together, and looking them up takes no minutes.
                ids = torch.from_numpy(self.clicks.by_popularity[t][::-1].copy())
                write_all(model.embeddings, f"t{t}", ids)
            self.progress(f"{self.share:.0%} of memory: looking popular rows up")
            for ids in self.clicks.popular(self.share):
                model.embeddings(ids)
            self.made = model, optimizer
        return self.made

    def disk_reads_per_second(self) -> float:
        """Of 4 KiB, at random places of the log."""
        from hotbed import _core

        files = sorted(str(path) for path in self.folder.rglob("*.rows"))
        sizes = [os.path.getsize(path) for path in files]
        files = [path for path, size in zip(files, sizes, strict=True) if size == max(sizes)]
        return DISK_READS / float(_core.random_reads(files, 4096, DISK_READS, 128))

    def close(self) -> None:
        self.made = None
        gc.collect()
        shutil.rmtree(self.folder, ignore_errors=True)


def _model(rows: int, storage: Any) -> tuple[Model, Any]:
    import hotbed as hb

    torch.manual_seed(0)
    tables = [hb.Table(f"t{t}", dim=DIM, rows=rows) for t in range(TABLES)]
    model = Model(hb.EmbeddingCollection(tables, seed=0, storage=storage))
    return model, hb.optim.Adagrad(model.parameters(), lr=LR)


def _measure(
    tiered: _Tiered | None,
    rows: int,
    batches: Iterable[dict[str, Any]],
    measured: int,
    ahead: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    import hotbed as hb

    model, optimizer = _model(rows, None) if tiered is None else tiered.build()
    where = "all in memory" if tiered is None else f"{tiered.share:.0%} of memory"
    progress(f"{where}, {'with' if ahead else 'without'} look-ahead")

    loss_of = nn.functional.binary_cross_entropy_with_logits
    timing = Timing()
    warm_up = WARM_UP_IN_MEMORY if tiered is None else WARM_UP
    before: dict[str, float] = {}
    cpu = 0.0
    began = 0.0
    with OtherWork() as other:
        feed = hb.lookahead(batches, model, DEPTH, HORIZON) if ahead else batches
        for i, batch in enumerate(feed):
            if i == warm_up:
                before, cpu = model.embeddings.stats(), _cpu_seconds()
            if i > warm_up:
                timing.ms.append((time.perf_counter() - began) * 1e3)
            if len(timing.ms) == measured:
                break
            began = time.perf_counter()
            loss_of(model(batch), batch["label"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        cpu = (_cpu_seconds() - cpu) / measured * 1e3
        after = model.embeddings.stats()
    timing.other_work = other.share
    counts = Counts.between(before, after)
    return {
        "timing": timing,
        "missed": counts.missed / measured,
        "hit_rate": counts.hit_rate,
        "cpu_ms": cpu,
    }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
