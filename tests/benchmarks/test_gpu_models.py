"""The GPU benchmark's trainings, at toy size on whatever device there is."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_models
from benchmarks.report import Report
from benchmarks.steps import timed_steps


def test_every_scenario_runs_and_tells_its_sizes() -> None:
    report = Report("gpu", quick=True)
    gpu_models.measure(report, None, lambda text: None)
    configs = [row["config"] for row in report.rows]
    assert [c.split(",")[0].split()[0] for c in configs] == ["synthetic"] + ["dlrm"] * 4 + [
        "cache"
    ] * 14
    assert all(row["iterations"] == gpu_models.QUICK.steps for row in report.rows)
    over_ram = "dlrm over RAM, 0.0002 GB on the device, AMP, look-ahead"
    assert report.figures[f"{over_ram}: rows brought up a step"] > 0
    assert 0 < report.figures[f"{over_ram}: hit rate"] < 1
    assert f"{over_ram} / all in GPU memory" in report.ratios


@pytest.mark.parametrize(("room", "expected"), [(10**9, (900, 30, 5)), (4000, (365, 30, 5))])
def test_tables_are_cut_to_fit(room: int, expected: tuple[int, ...]) -> None:
    report = Report("gpu", quick=True)
    assert gpu_models._within((900, 30, 5), 10, room, report, "tables") == expected
    assert len(report.remarks) == (room == 4000)


def test_steps_are_timed_after_the_warm_up() -> None:
    seen: list[int] = []
    timing = timed_steps(seen.append, range(100), torch.device("cpu"), 3, 5)
    assert seen == list(range(8)) and len(timing.ms) == 5
    with pytest.raises(ValueError, match="8 batches are needed, 6 came"):
        timed_steps(seen.append, range(6), torch.device("cpu"), 3, 5)
