"""One training step over large tables: Hotbed, torch and FBGEMM in turn."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.machine import available_bytes
from benchmarks.measure import ITERATIONS, contest
from benchmarks.peers.fbgemm import Fbgemm
from benchmarks.peers.hotbed_tables import HotbedTables
from benchmarks.peers.torch_bags import TorchBags
from benchmarks.report import Report
from benchmarks.workload import STATE_FLOATS, Workload

LR = {"sgd": 0.01, "rowwise_adagrad": 0.01, "adagrad": 0.01, "adam": 1e-3}
PHASES = {"forward": "forward", "step": "forward+backward+update"}
TABLES, ROWS, DIM = 26, 1_000_000, 64
QUICK_ROWS, QUICK_ITERATIONS = 20_000, 5
SHARE_OF_MEMORY = 0.75


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    return measure(
        Report("step", quick), ["sgd", "rowwise_adagrad", "adagrad", "adam"], 8192, 1, progress
    )


def measure(
    report: Report,
    optimizers: list[str],
    batch: int,
    bag: int,
    progress: Callable[[str], None],
    *,
    tables: int = TABLES,
    most_rows: int = ROWS,
    dim: int = DIM,
    ragged: bool = False,
) -> Report:
    """Fills `report` with every optimizer and every contender that has it. `bag`: ids of a bag; on
    average, if `ragged`."""
    budget = int(available_bytes() * SHARE_OF_MEMORY)
    missing: list[str] = []
    for optimizer in optimizers:
        rows = QUICK_ROWS
        if not report.quick:
            rows = min(most_rows, fitting_rows(optimizer, budget, tables, dim))
        if not report.quick and rows < most_rows:
            report.remarks.append(
                f"{optimizer}: {rows:,} rows a table instead of {most_rows:,}, because one contender's "
                f"weights and states must fit into {budget / 1e9:.1f} GB."
            )
        work = Workload(tables, rows, dim, batch, bag, ragged=ragged)
        contenders = [
            HotbedTables(work, optimizer, LR[optimizer]),
            HotbedTables(work, optimizer, LR[optimizer], fused=True),
        ]
        for kind in (Fbgemm, TorchBags):
            reason = kind.lacks(optimizer)
            if reason:
                missing.append(reason)
            else:
                contenders.append(kind(work, optimizer, LR[optimizer]))
        timings = contest(
            contenders,
            budget,
            iterations=QUICK_ITERATIONS if report.quick else ITERATIONS,
            progress=lambda text, optimizer=optimizer: progress(f"{optimizer}, {text}"),
        )
        for phase, label in PHASES.items():
            moved = work.forward_bytes() if phase == "forward" else work.step_bytes(optimizer)
            config = f"{optimizer}, {label}, {work.shape}"
            for contender in contenders:
                report.add(contender.name, config, timings[contender.name, phase], moved)
            suffix = "/forward" if phase == "forward" else ""
            for contender in contenders[2:]:
                theirs = timings[contender.name, phase].median
                ratio = f"{contender.name}/{optimizer}{suffix}"
                report.ratios[ratio] = theirs / timings["hotbed", phase].median
                if phase == "step":
                    report.ratios[f"{ratio}/fused"] = theirs / timings["hotbed fused", phase].median
        report.figures[f"unique_rows_a_batch/{optimizer}"] = work.unique_rows
    report.remarks += [f"Not measured: {reason}." for reason in dict.fromkeys(missing)]
    return report


def fitting_rows(optimizer: str, budget: int, tables: int, dim: int) -> int:
    """The multiple of 100,000 at which one contender's tables fit into `budget`."""
    row = 4 * (dim + STATE_FLOATS[optimizer](dim))
    return budget // (tables * row) // 100_000 * 100_000
