"""Scenarios of the GPU benchmark end within their time, and what fails loses nothing else."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_scenarios import Run, Scenario, run_all
from benchmarks.measure import Timing
from benchmarks.report import Report


class Clock:
    """Seconds that pass when a scenario says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def a_run(quick: bool = False, seconds: float = 480) -> tuple[Run, Clock]:
    clock = Clock()
    hardware = {"copy_gb_per_s": {"1": 1.0}}
    report = Report("gpu", quick, hardware=hardware)
    device = torch.device("cpu")
    return Run(report, device, deadline=clock.now + seconds, clock=clock), clock


def adds(name: str, clock: Clock, takes: float = 0.0, **options: Any) -> Scenario:
    def measure(run: Run) -> None:
        clock.now += takes
        run.add(name, Timing([1.0]))

    return Scenario(name, measure, **options)


def fails(name: str, error: Exception) -> Scenario:
    def measure(run: Run) -> None:
        run.add(f"{name}, first half", Timing([1.0]))
        raise error

    return Scenario(name, measure)


def configs(report: Report) -> list[str]:
    return [row["config"] for row in report.rows]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("rows are off\nby much"), "ValueError: rows are off"),
        (torch.OutOfMemoryError("CUDA out of memory."), "OutOfMemoryError: CUDA out of memory."),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_failure_is_told_and_stops_no_other(
    error: Exception, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, clock = a_run()
    run_all(run, [adds("a", clock), fails("b", error), adds("c", clock)])
    assert configs(run.report) == ["a", "b, first half", "c"]
    assert run.report.failed == {"b": told} and run.report.skipped == {}
    assert "Traceback" in capsys.readouterr().err


def test_the_report_is_saved_before_and_after_each() -> None:
    run, clock = a_run()
    saved: list[Report] = []
    parts = [adds("a", clock), fails("b", RuntimeError("lost")), adds("c", clock)]
    run_all(run, parts, lambda report: saved.append(copy.deepcopy(report)))
    assert [len(report.rows) for report in saved] == [0, 1, 2, 3]
    # As somebody finds it who looks for what a killed run had measured.
    assert [list(report.skipped) for report in saved] == [
        ["a", "b", "c"], ["b", "c"], ["c"], [],
    ]  # fmt: skip
    assert saved[1].skipped["b"] == "the run ended before it did"


def test_what_would_not_end_in_time_is_left_out() -> None:
    run, clock = a_run(seconds=100)
    parts = [
        adds("a", clock, takes=70, seconds=50),
        adds("long", clock, seconds=31),
        adds("short", clock, takes=30, seconds=29),
        adds("late", clock),
    ]
    run_all(run, parts)
    assert configs(run.report) == ["a", "short"]
    assert run.report.skipped == {
        "long": "30 s were left and it takes about 31 s",
        "late": "0 s were left and it takes about 0 s",
    }
    assert run.report.failed == {}
    assert run.report.figures == {"seconds of a": 70.0, "seconds of short": 30.0}


def test_a_scenario_that_takes_too_long_keeps_what_it_has() -> None:
    run, clock = a_run(seconds=100)

    def measure(run: Run) -> None:
        for half in (1, 2, 3):
            run.doing(f"half {half}")
            clock.now += 60
            run.add(f"half {half}", Timing([1.0]))

    run_all(run, [Scenario("long", measure), adds("late", clock)])
    assert configs(run.report) == ["half 1", "half 2"]
    assert run.report.skipped["long"] == "time was up 120 s after it began"
    assert "late" in run.report.skipped and run.report.failed == {}


def test_toy_sizes_take_no_such_time() -> None:
    run, clock = a_run(quick=True, seconds=10)
    run_all(run, [adds("a", clock, seconds=60)])
    assert configs(run.report) == ["a"]


def test_without_a_roof_nothing_is_measured_under_it() -> None:
    run, clock = a_run()
    run_all(run, [adds("under it", clock, needs_roof=True), adds("other", clock)])
    assert configs(run.report) == ["other"]
    assert run.report.skipped == {"under it": "no roof was measured"}


def test_a_failure_keeps_no_memory() -> None:
    run, _ = a_run()
    kept: list[weakref.ref[torch.Tensor]] = []

    def measure(run: Run) -> None:
        table = torch.zeros(10)
        kept.append(weakref.ref(table))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def look(run: Run) -> None:
        assert kept[0]() is None

    gc.disable()  # it must not be chance that collects
    try:
        run_all(run, [Scenario("a", measure), Scenario("b", look)])
    finally:
        gc.enable()
    assert list(run.report.failed) == ["a"]


def test_torch_settings_end_with_a_scenario() -> None:
    run, _ = a_run()
    seen = []

    def measure(run: Run) -> None:
        seen.append(torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high")
        raise ValueError

    run_all(run, [Scenario("a", measure), Scenario("b", measure)])
    assert seen == ["highest"] * 2 and torch.get_float32_matmul_precision() == "highest"


def test_a_compiler_that_gives_up_is_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    run, clock = a_run()

    def attempt(compiled: Callable[..., Any]) -> None:
        raise RuntimeError("no compiler")

    assert run.compiled("product", torch.mm, attempt) is None
    assert run.compiled("product", torch.mm, lambda compiled: None) is torch.mm
    run.compiling_until = clock.now - 1
    assert run.compiled("sum", torch.add, attempt) is None
    assert run.report.remarks == [
        "product: torch.compile gave up (RuntimeError).",
        "sum: too late to compile, torch.compile was left out.",
    ]


def test_a_write_that_dies_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = a_run()[0].report
    out = tmp_path / "out.json"
    report.failed["b"] = "lost"
    report.write(out)
    assert json.loads(out.read_text())["failed"] == {"b": "lost"}
    for said in itertools.repeat("again", 2):
        report.remark(said)
    assert report.remarks == ["again"]
    before = out.read_text()

    def dies(path: Path, text: str) -> int:
        path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", dies)
    with pytest.raises(KeyboardInterrupt):
        report.write(out)
    assert out.read_text() == before
