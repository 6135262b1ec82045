"""The same step with static tables and with dynamic ones whose ids are all known."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.machine import available_bytes
from benchmarks.measure import ITERATIONS, contest
from benchmarks.peers.hotbed_tables import HotbedTables
from benchmarks.report import Report
from benchmarks.step import (
    DIM,
    LR,
    PHASES,
    QUICK_ITERATIONS,
    QUICK_ROWS,
    ROWS,
    SHARE_OF_MEMORY,
    TABLES,
)
from benchmarks.workload import Workload


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("dynamic", quick)
    report.remarks.append("dynamic/...: the dynamic step's median over the static step's.")
    for batch, bag in ((8192, 1), (2048, 10)):
        work = Workload(TABLES, QUICK_ROWS if quick else ROWS, DIM, batch, bag)
        optimizer = "rowwise_adagrad"
        contenders = [
            HotbedTables(work, optimizer, LR[optimizer]),
            HotbedTables(work, optimizer, LR[optimizer], dynamic=True),
        ]
        timings = contest(
            contenders,
            int(available_bytes() * SHARE_OF_MEMORY),
            iterations=QUICK_ITERATIONS if quick else ITERATIONS,
            progress=lambda text, bag=bag: progress(f"{bag} a bag, {text}"),
        )
        for phase, label in PHASES.items():
            moved = work.forward_bytes() if phase == "forward" else work.step_bytes(optimizer)
            for contender in contenders:
                report.add(
                    contender.name,
                    f"{optimizer}, {label}, {work.shape}",
                    timings[contender.name, phase],
                    moved,
                )
            suffix = "/forward" if phase == "forward" else ""
            report.ratios[f"dynamic/{optimizer}/{bag} a bag{suffix}"] = (
                timings["dynamic", phase].median / timings["hotbed", phase].median
            )
    return report
