"""A training step of tables that processes share, with 1 to 50 ids a bag: Hotbed and TorchRec; in one
process Hotbed and FBGEMM."""

from __future__ import annotations

import argparse
import itertools
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import worlds
from benchmarks.exchange import WHOLE, Measured, other_work, run_group
from benchmarks.measure import Contender, Timing
from benchmarks.peers.fbgemm import Fbgemm
from benchmarks.peers.hotbed_ranks import HotbedAlone, HotbedRanks
from benchmarks.peers.torchrec_tables import TorchRec
from benchmarks.report import Report
from benchmarks.step import LR
from benchmarks.workload import Workload

TABLES, ITERATIONS, QUICK_ITERATIONS = 26, 30, 3
HOW = ("table", "row", "column")


class Shape(NamedTuple):
    """Tables, and batches of a rank."""

    rows: int
    dim: int
    batch: int
    bag: int
    alpha: float
    """Of the power law of ids; 0: uniform."""

    def __str__(self) -> str:
        ids = f"power law {self.alpha}" if self.alpha else "uniform"
        return (
            f"{TABLES} x {self.rows:,} x {self.dim}, batch {self.batch} x {self.bag} a rank, {ids}"
        )


BAGS, OF_MEMORY = (1, 10, 20, 50), 20
SKEWS = (1.05, 0.0)


def shapes(bags: Sequence[int], quick: bool) -> list[Shape]:
    """The shape of 100,000 rows has 20 ids a bag; those of 250,000 have fewer samples where bags are long."""
    if quick:
        return [Shape(1000, 16, 64, bag, 1.05) for bag in bags[:2]]
    return [
        Shape(100_000, 32, 2048, bag, alpha)
        if bag == 20
        else Shape(250_000, 64, 4096 // bag if bag > 1 else 4096, bag, alpha)
        for bag, alpha in itertools.product(bags, SKEWS)
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bag", type=int, action="append", help="only so many ids a bag; may be repeated"
    )
    parser.add_argument("--world", type=int, default=2, help="processes")


def run(
    *,
    quick: bool,
    progress: Callable[[str], None],
    bag: Sequence[int] | None = None,
    world: int = 2,
) -> Report:
    report = Report("exchange-bags", quick)
    for shape in shapes(bag or BAGS, quick):
        for how in (*HOW, "alone"):
            # No rank has a whole row of a table that is cut by columns.
            optimizer = "adagrad" if how == "column" else "rowwise_adagrad"
            progress(f"{shape}, {how}")
            task = shape, how, optimizer, QUICK_ITERATIONS if quick else ITERATIONS
            found = worlds.run(1 if how == "alone" else world, measure_rank, *task)
            _report(report, f"{optimizer}, {shape}", how, found)
            if how != "alone" and (quick or shape.bag == OF_MEMORY):
                for n, name in enumerate(found[0].work):
                    grown = worlds.run(world, memory_of_rank, shape, how, optimizer, n)
                    report.figures[f"{optimizer}, {shape}: {name}, MB above the start"] = max(grown)
    report.remarks += [
        f"{world} processes, one thread each; a step takes as long as the slower rank takes.",
        "Row-wise Adagrad; Adagrad where tables are cut by columns, as Hotbed refuses the other one there.",
        "alone: one process with one thread, whole tables, the samples of a rank.",
    ]
    for kind in (TorchRec, Fbgemm):
        if reason := kind.lacks("adagrad"):
            report.remark(f"Not measured: {reason}.")
    return report


def _report(report: Report, config: str, how: str, found: list[Measured]) -> None:
    medians: dict[str, float] = {}
    for name in found[0].work:
        every = [one.ms[name, WHOLE] for one in found]
        slower = [max(times) for times in zip(*every, strict=True)]
        timing = Timing(slower, other_work([one.work[name] for one in found]))
        report.add(name, config, timing)
        medians[name] = timing.median
    peers = ("fbgemm",) if how == "alone" else (f"torchrec, {how}-wise",)
    for name, peer in itertools.product(medians, peers):
        if peer in medians and name.startswith("hotbed"):
            report.ratios[f"{peer}/{name}: {config}"] = medians[peer] / medians[name]
    for what, value in found[0].figures.items():
        report.figures[f"{config}: {what}"] = value


def contenders(work: Workload, how: str, optimizer: str) -> list[Contender]:
    """Those of a way to cut tables; "alone": of one process."""
    lr = LR[optimizer]
    found: list[Contender] = []
    if how == "alone":
        found.append(HotbedAlone(work, optimizer, lr))
        return found if Fbgemm.lacks(optimizer) else [*found, Fbgemm(work, optimizer, lr)]
    found += [HotbedRanks(work, optimizer, lr, how, over) for over in ("memory", "gloo")]
    return found if TorchRec.lacks(optimizer) else [*found, TorchRec(work, optimizer, lr, how)]


def measure_rank(
    rank: int, world: int, shape: Shape, how: str, optimizer: str, iterations: int
) -> Measured:
    """The contenders in turn, with all ranks at the same one."""
    work = Workload(TABLES, shape.rows, shape.dim, world * shape.batch, shape.bag, shape.alpha)
    group = contenders(work.share(rank, world), how, optimizer)
    measured = Measured()
    for contender in group:
        contender.build()
    run_group(group, iterations, measured)
    for contender in group:
        if isinstance(contender, HotbedRanks):
            for what, sent in contender.bytes_sent().items():
                measured.figures[f"{contender.name}: MB of {what} sent by rank 0"] = round(
                    sent / 1e6, 3
                )
    return measured


def memory_of_rank(
    rank: int, world: int, shape: Shape, how: str, optimizer: str, number: int
) -> float:
    """MB that the process has grown by after some steps of one contender, whose tables count."""
    work = Workload(TABLES, shape.rows, shape.dim, world * shape.batch, shape.bag, shape.alpha)
    contender = contenders(work.share(rank, world), how, optimizer)[number]
    before = _resident()
    contender.build()
    run_group([contender], QUICK_ITERATIONS, Measured())
    return round((_resident() - before) / 1e6)


def _resident() -> int:
    """Bytes of this process in memory, shared ones among them."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * mmap.PAGESIZE
