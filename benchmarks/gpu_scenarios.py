"""Scenarios of the GPU benchmark: what each is given, and how all of them end within a time.

A card may be lost, a scenario may fail or run out of memory, and time may run out: whatever was
measured before is kept, and the report names what is missing.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_roof import Roof, kept_precision
from benchmarks.gpu_sizes import QUICK, Sizes
from benchmarks.machine import free_bytes
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.tables import cut_to_fit

SHARE_OF_DEVICE = 0.8


class OutOfTime(Exception):
    """The run's deadline came in the middle of a scenario."""


@dataclass
class Run:
    """What every scenario is given. One thread."""

    report: Report
    device: torch.device
    progress: Callable[[str], None] = lambda text: None
    deadline: float = math.inf
    """By `clock`: after it no scenario begins, and the one that runs ends at its next `doing`."""
    compiling_until: float = math.inf
    """By `clock`: after it torch compiles nothing more."""
    clock: Callable[[], float] = time.monotonic
    roof: Roof | None = None
    """Set by the scenario that measures it."""
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = QUICK if self.report.quick else Sizes()

    def doing(self, text: str) -> None:
        """Tells what comes next.

        Raises:
            OutOfTime: there is no time for it.
        """
        self.check_time()
        self.progress(text)

    def check_time(self) -> None:
        """
        Raises:
            OutOfTime: the deadline has come.
        """
        if self.clock() >= self.deadline:
            raise OutOfTime

    def add(self, config: str, timing: Timing, moved: float | None = None) -> None:
        """Adds a row of Hotbed's; with a floor where a roof and the bytes that must move are known."""
        if moved is None or self.roof is None:
            self.report.add("hotbed", config, timing)
        else:
            self.report.add("hotbed", config, timing, moved, floor_ms=self.roof.floor_ms(moved))

    def compiled(
        self, what: str, function: Any, attempt: Callable[[Any], object]
    ) -> Callable[..., Any] | None:
        """`function` compiled by torch; None where it is too late for that, or torch gives up.

        `attempt` calls it as it will be measured.
        """
        if self.report.quick:
            return None
        if self.clock() > self.compiling_until:
            self.report.remark(f"{what}: too late to compile, torch.compile was left out.")
            return None
        try:
            compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
            attempt(compiled)
        except Exception as error:  # whatever a compiler raises, the rest is still worth measuring
            self.report.remark(f"{what}: torch.compile gave up ({type(error).__name__}).")
            return None
        return compiled

    def device_room(self) -> float:
        """Bytes of the device that tables may take."""
        return free_bytes(self.device) * SHARE_OF_DEVICE

    def fitting(
        self, rows: tuple[int, ...], row_bytes: int, room: float, what: str
    ) -> tuple[int, ...]:
        """The same tables, cut to `room` bytes; the report says so."""
        cut = cut_to_fit(rows, row_bytes, room)
        if cut != rows:
            self.report.remark(
                f"{what}: tables are cut to {max(cut):,} rows, {sum(cut) / sum(rows):.0%} of all, to "
                f"fit into {room / 1e9:.0f} GB."
            )
        return cut

    def give_memory_back(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Scenario:
    """One part of the benchmark that fails, is left out and is kept on its own."""

    name: str
    """Of one or more words; the first is what `--only` chooses it by."""
    measure: Callable[[Run], None]
    seconds: float = 0.0
    """It is not begun with less time left."""
    needs_roof: bool = False


def run_all(
    run: Run, scenarios: Iterable[Scenario], save: Callable[[Report], None] = lambda report: None
) -> None:
    """Runs them in order, and saves the report before the first and after each.

    An exception of one is told, noted in `Report.failed`, and stops no other. What has too little
    time left, or lacks what it needs, is noted in `Report.skipped`.
    """
    scenarios = list(scenarios)
    report = run.report
    # Were the process killed, the report last saved names what it lacks.
    report.skipped.update((s.name, "the run ended before it did") for s in scenarios)
    save(report)
    for scenario in scenarios:
        reason = _reason_against(run, scenario)
        if reason:
            report.skipped[scenario.name] = reason
        else:
            _run_one(run, scenario)
        save(report)


def _reason_against(run: Run, scenario: Scenario) -> str:
    if scenario.needs_roof and run.roof is None:
        return "no roof was measured"
    left = run.deadline - run.clock()
    needed = 0.0 if run.report.quick else scenario.seconds
    if left <= needed:
        return f"{max(left, 0):.0f} s were left and it takes about {needed:.0f} s"
    return ""


def _run_one(run: Run, scenario: Scenario) -> None:
    report, name, begin = run.report, scenario.name, run.clock()
    del report.skipped[name]
    steps: tuple[Callable[[], None], ...] = (
        lambda: scenario.measure(run),
        lambda: _synchronize(run.device),  # else a later scenario would be blamed for an error
        run.give_memory_back,
    )
    with kept_precision():
        for step in steps:
            # Once an exception is handled nothing refers to its frames, nor they to tables.
            try:
                step()
            except OutOfTime:
                report.skipped[name] = f"time was up {run.clock() - begin:.0f} s after it began"
            except Exception as error:
                said = str(error).strip().partition("\n")[0]
                report.failed.setdefault(name, f"{type(error).__name__}: {said}".rstrip(": "))
                traceback.print_exc()
    report.figures[f"seconds of {name}"] = round(run.clock() - begin, 1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
