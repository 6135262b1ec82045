"""Figures of a machine: their file, and how they are found."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from dist.worlds import run
from effort import SOAK
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.dist import Measured, PlanError, Rates, Traffic, measuring
from hotbed.dist.measuring import fitted
from hotbed.dist.rates import ALIKE, UNITS

SOME_PROBES = measuring.PROBES[::5]
"""Found once in a process, which measures several times."""
SOME = Rates.of([1e-9 * (at + 1) for at in range(len(UNITS))])


@given(st.lists(st.floats(0, 1e3), min_size=len(UNITS), max_size=len(UNITS)))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, seconds: list[float]
) -> None:
    path = tmp_path_factory.mktemp("rates") / "rates.toml"
    rates = Rates.of(seconds)
    rates.write(path)
    assert Rates.read(path) == rates and rates.seconds.tolist() == seconds


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: "", "have the key version"),
        (lambda text: "[", "is not TOML"),
        (lambda text: text.replace("version = 1", "version = 2"), "version 2 is not 1"),
        (lambda text: text + "more = 1.0\n", "key 'more' is missing or unknown"),
        (lambda text: text.replace("ssd_row", "ssd_rows"), "key 'ssd_row' is missing"),
        (lambda text: text.replace("ssd_row = ", "ssd_row = -"), "ssd_row must be seconds from 0"),
        (lambda text: text.replace("ssd_row = ", "ssd_row = true #"), "ssd_row .* not True"),
        (lambda text: text.replace("ssd_row = ", "ssd_row = nan #"), "ssd_row .* not nan"),
        (lambda text: text.replace("ssd_row = ", "ssd_row = 2e6 #"), "to 1,000,000, not 2000000.0"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, change: object, says: str) -> None:
    path = tmp_path / "rates.toml"
    SOME.write(path)
    assert callable(change)
    path.write_text(change(path.read_text()))
    with pytest.raises(PlanError, match=says) as error:
        Rates.read(path)
    assert str(path) in str(error.value)
    with pytest.raises(PlanError, match="No such file"):
        Rates.read(tmp_path / "none.toml")


def test_rates_are_bounded() -> None:
    with pytest.raises(PlanError, match=r"row must be seconds from 0 to 1,000,000, not 1e\+308"):
        Rates(row=1e308, row_byte=1e308)
    traffic = {"T": Traffic(2**40, 2**40, 2**40)}
    slowest = Measured(Rates.of(np.full(len(UNITS), 1e6)), traffic)
    made = hb.plan([hb.Table("T", 64, 2**50, "sum")], 1000, strategy=slowest)
    assert made.cost is not None and math.isfinite(made.cost.step)
    with pytest.raises(PlanError, match=f"expected {len(UNITS)} seconds, got 2"):
        Rates.of([1.0, 2.0])


def test_figures_of_before_they_were_told_apart_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rates.toml"
    SOME.write(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("inside_")))
    alike = {name: getattr(SOME, other) for name, other in ALIKE.items()}
    assert Rates.read(path) == dataclasses.replace(SOME, **alike)


@given(st.integers(0, 10_000))
def test_prices_are_found_again(seed: int) -> None:
    draw = np.random.default_rng(seed)
    prices = np.abs(draw.normal(size=5)) * (draw.random(5) < 0.7) + 1e-12
    amounts = draw.random((12, 5)) * [1, 10, 1e3, 1e6, 1e9]
    found = fitted(amounts, amounts @ (prices / [1, 10, 1e3, 1e6, 1e9]))
    assert (found >= 0).all()
    times = amounts @ found
    assert times == pytest.approx(amounts @ (prices / [1, 10, 1e3, 1e6, 1e9]), rel=1e-3)


def test_units_of_which_nothing_was_seen_cost_nothing() -> None:
    assert fitted(np.array([[2.0, 0.0], [4.0, 0.0]]), np.array([1.0, 2.0])).tolist() == [0.5, 0.0]


def measures(rank: int, world: int, folder: str, local: int | None = None) -> None:
    if not SOAK:  # figures as those of a machine that something else keeps busy
        vars(measuring).update(_ROUNDS=1, _ITERATIONS=1, _BATCHES=2, PROBES=SOME_PROBES)
    found = hb.dist.measure(ssd=folder, local_world_size=local)
    found.write(f"{folder}/{rank}.toml")
    assert all(0 <= value < math.inf for value in dataclasses.astuple(found))
    assert found.ssd_row > 0  # what is fitted may find one of two to cost nothing


@pytest.mark.process
def test_ranks_measure_the_same(tmp_path: Path) -> None:
    run(2, measures, str(tmp_path))
    found = Rates.read(tmp_path / "0.toml")
    assert found == Rates.read(tmp_path / "1.toml")
    assert all(getattr(found, name) == getattr(found, other) for name, other in ALIKE.items())


@pytest.mark.process
def test_ranks_of_machines_measure_the_same(tmp_path: Path) -> None:
    run(4, measures, str(tmp_path), 2)
    assert Rates.read(tmp_path / "0.toml") == Rates.read(tmp_path / "3.toml")
