"""Two machines of two ranks each, joined by a slow link: one level of exchange, and two."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks import worlds
from benchmarks.exchange import WHOLE, Measured, other_work, run_group
from benchmarks.measure import Timing
from benchmarks.peers.hotbed_ranks import HotbedRanks
from benchmarks.report import Report
from benchmarks.scale import network
from benchmarks.step import LR
from benchmarks.workload import Workload

MACHINES, LOCAL = 2, 2
TABLES, ROWS, DIM = 26, 100_000, 64
BAGS = {1: 4096, 20: 1024}
"""Samples of a rank by ids a bag."""
SKEWS = {"skewed": 1.05, "uniform": 0.0}
RATES = ("1gbit", "10gbit")
ITERATIONS = 12
OPTIMIZER = "adagrad"
FLAT, LEVELS, GRID = "one level", "two levels", "two levels, grid"


class OnMachines(HotbedRanks):
    """Tables cut by row. `name`: how they are exchanged, `FLAT`, `LEVELS` or `GRID`."""

    def __init__(self, workload: Workload, name: str) -> None:
        super().__init__(workload, OPTIMIZER, LR[OPTIMIZER], "row", "gloo")
        self.name = name

    def distributed(self, embeddings: Any, plan: Any) -> Any:
        import hotbed as hb

        if self.name == FLAT:
            return hb.distribute(embeddings, plan, shared_memory=False)
        if self.name == GRID:
            grid = hb.dist.GridWise.of_machines(MACHINES * LOCAL, LOCAL)
            kinds = dict.fromkeys(plan.tables, grid)
            plan = hb.dist.Plan(plan.tables.values(), MACHINES * LOCAL, kinds)
        return hb.distribute(embeddings, plan, local_world_size=LOCAL)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", choices=RATES, action="append", help="of the link; default: all")


def run(*, quick: bool, progress: Callable[[str], None], rate: list[str] | None = None) -> Report:
    report = Report("machines", quick)
    for link in rate or RATES:
        for bag, batch in BAGS.items():
            for named, alpha in SKEWS.items():
                _measure(report, link, (bag, 64 if quick else batch, alpha), named, progress)
    report.remarks += [
        f"{MACHINES} machines of {LOCAL} ranks each, one thread a rank, on two cores in all; Adagrad.",
        f'"{FLAT}": over Gloo between all ranks, also those of a machine (loopback). "{LEVELS}": shared '
        "memory inside, ids of a machine brought together. Tables cut by row; with grid by machine, and "
        "inside by column.",
        "A step takes as long as the slowest rank takes.",
    ]
    return report


def _measure(
    report: Report,
    link: str,
    shape: tuple[int, int, float],
    named: str,
    progress: Callable[[str], None],
) -> None:
    bag, batch, _ = shape
    rows = 1000 if report.quick else ROWS
    config = f"{link}, {TABLES} x {rows:,} x {DIM}, batch {batch} x {bag} a rank, {named}"
    progress(config)
    with network(report, MACHINES, link) as (prefix, environment):
        found = worlds.run(
            MACHINES * LOCAL,
            measure_rank,
            rows,
            shape,
            2 if report.quick else ITERATIONS,
            prefix=lambda rank: prefix(rank // LOCAL),
            environment=environment,
        )
    medians = {}
    for name in found[0].work:
        slowest = [max(ms) for ms in zip(*(one.ms[name, WHOLE] for one in found), strict=True)]
        timing = Timing(slowest, other_work([one.work[name] for one in found]))
        report.add(name, config, timing)
        medians[name] = timing.median
        across = sum(one.figures[name] for one in found)
        report.figures[f"{config}: {name}, MB a step between machines"] = round(across / 1e6, 3)
    for name in medians:
        if name != FLAT:
            report.ratios[f"{FLAT}/{name}: {config}"] = medians[FLAT] / medians[name]


def measure_rank(
    rank: int, world: int, rows: int, shape: tuple[int, int, float], iterations: int
) -> Measured:
    """The ways in turn."""
    bag, batch, alpha = shape
    work = Workload(TABLES, rows, DIM, world * batch, bag, alpha)
    names = (FLAT, LEVELS) if bag == 1 else (FLAT, LEVELS, GRID)
    group = [OnMachines(work.share(rank, world), name) for name in names]
    measured = Measured()
    for contender in group:
        contender.build()
    run_group(group, iterations, measured)
    for contender in group:
        measured.figures[contender.name] = _bytes_across(contender, rank)
    return measured


def _bytes_across(contender: OnMachines, rank: int) -> float:
    """Bytes that this rank sends to the other machine in a step."""
    sent = 0
    wire = contender.ranks._wire
    reserve = wire.reserve

    def counted(sizes: list[int]) -> Any:
        nonlocal sent
        sent += sum(n for to, n in enumerate(sizes) if to // LOCAL != rank // LOCAL)
        return reserve(sizes)

    wire.reserve = counted
    for i in range(len(contender.batches)):
        contender.one_step(i)
    del wire.reserve
    return sent / len(contender.batches)
