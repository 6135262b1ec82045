"""The harness itself: packing, turns, floors, the power law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import machine
from benchmarks.index import distinct_keys
from benchmarks.measure import WARM_UP, Timing, contest, pack
from benchmarks.report import Report
from benchmarks.workload import Workload, power_law_ranks


class Recorder:
    """A contender that does nothing but write down what was done to it."""

    def __init__(self, name: str, size: int, log: list[str]) -> None:
        self.name, self.size, self.log = name, size, log

    def nbytes(self) -> int:
        return self.size

    def build(self) -> None:
        self.log.append(f"build {self.name}")

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"only": lambda i: self.log.append(f"{self.name}{i}")}

    def drop(self) -> None:
        self.log.append(f"drop {self.name}")


def test_contenders_that_fit_take_turns() -> None:
    log: list[str] = []
    timings = contest([Recorder("a", 4, log), Recorder("b", 6, log)], 10, iterations=2)
    runs = [f"{name}{i}" for i in range(WARM_UP + 2) for name in "ab"]
    assert log == ["build a", "build b", *runs, "drop a", "drop b"]
    assert [len(timings[name, "only"].ms) for name in "ab"] == [2, 2]


def test_contenders_that_do_not_fit_are_rebuilt_in_rounds() -> None:
    log: list[str] = []
    timings = contest([Recorder("a", 6, log), Recorder("b", 6, log)], 10, iterations=6, rounds=3)
    lives = [entry for entry in log if " " in entry]
    assert lives == 3 * ["build a", "drop a", "build b", "drop b"]
    assert [len(timings[name, "only"].ms) for name in "ab"] == [6, 6]


def test_contenders_are_dropped_after_a_failure() -> None:
    log: list[str] = []
    broken = Recorder("a", 1, log)
    broken.phases = lambda: {"only": lambda i: 1 // 0}
    with pytest.raises(ZeroDivisionError):
        contest([broken], 10)
    assert log == ["build a", "drop a"]


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 10), min_size=1), st.integers(10, 30))
def test_groups_keep_order_and_budget(sizes: list[int], budget: int) -> None:
    contenders = [Recorder(str(i), size, []) for i, size in enumerate(sizes)]
    groups = pack(contenders, budget)
    assert [c for group in groups for c in group] == contenders
    assert all(sum(c.nbytes() for c in group) <= budget for group in groups)


def test_a_contender_too_large_for_the_machine_is_refused() -> None:
    with pytest.raises(MemoryError, match="big needs 11.0 GB .* 10.0 GB"):
        pack([Recorder("big", 11_000_000_000, [])], 10_000_000_000)


def test_power_law_has_the_stated_exponent() -> None:
    ranks = power_law_ranks(np.random.default_rng(0), 400_000, 1_000_000, 1.05)
    assert ranks.min() == 0 and ranks.max() < 1_000_000
    # The share of ranks in [a, b) is the integral of x**-1.05 over [a + 1, b + 1).
    total = 1 - 1_000_001**-0.05
    for a, b in ((0, 1), (1, 10), (10, 1000), (1000, 1_000_000)):
        expected = ((a + 1) ** -0.05 - (b + 1) ** -0.05) / total
        assert np.mean((ranks >= a) & (ranks < b)) == pytest.approx(expected, rel=0.05)


def test_workload_counts_rows_and_bytes() -> None:
    work = Workload(tables=3, rows=50, dim=8, batch=16, bag=2)
    assert work.ids.shape[1:] == (3, 32)
    assert work.ids.min() >= 0 and work.ids.max() < 50
    by_hand = np.mean([sum(len(Counter(t)) for t in batch.tolist()) for batch in work.ids])
    assert work.unique_rows == by_hand
    outputs = 3 * 16 * 8 * 4
    assert work.forward_bytes() == 3 * 32 * 8 + by_hand * 32 + outputs
    assert work.step_bytes("sgd") == work.forward_bytes() + outputs + 2 * by_hand * 32
    assert work.step_bytes("adam") - work.step_bytes("sgd") == 2 * by_hand * 64
    assert work.table_bytes("rowwise_adagrad") == 3 * 50 * 36


def test_report_states_floor_and_noise(tmp_path: Path) -> None:
    hardware = {"cpu": "test", "cores": 2, "copy_gb_per_s": {"1": 10.0, "2": 20.0}}
    report = Report("step", quick=False, hardware=hardware)
    report.add("hotbed", "sgd", Timing([3.0, 1.0, 2.0], other_work=0.01), moved_bytes=20e6)
    report.ratios["fbgemm/sgd"] = 2.0
    row = report.as_json()["rows"][0]
    assert (row["median_ms"], row["min_ms"], row["max_ms"]) == (2.0, 1.0, 3.0)
    assert (row["floor_ms"], row["times_floor"]) == (1.0, 2.0)
    assert report.as_json()["remarks"] == []
    report.add("torch", "sgd", Timing([9.0], other_work=0.4))
    assert "NOISY" in report.as_json()["remarks"][0]
    report.write(tmp_path / "deep" / "out.json")
    assert (tmp_path / "deep" / "out.json").read_text().startswith("{")


def test_machine_tells_what_a_figure_depends_on() -> None:
    assert machine.copy_bandwidth(1, nbytes=1 << 20, repeats=3) > 0
    assert machine.available_bytes() > 0
    assert machine.versions()["torch"] != "not installed"


def test_keys_are_distinct() -> None:
    assert len(np.unique(distinct_keys(10_000))) == 10_000
