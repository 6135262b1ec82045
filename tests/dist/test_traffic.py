"""What batches ask of tables: counted, and assumed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dist.placements import table
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.dist import PlanError, Traffic


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_counts_are_those_of_a_loop(batches: list[list[list[int]]]) -> None:
    one = table("T", 10, 4, combiner="sum", padding_idx=9)
    inputs = [
        {"T": hb.Jagged(torch.tensor(sum(bags, [])).long(), lengths=[len(bag) for bag in bags])}
        for bags in batches
    ]
    found = hb.dist.traffic_of([one], inputs)["T"]
    kept = [[i for bag in bags for i in bag if i != 9] for bags in batches]
    assert found.bags == 3 and found.has_lengths and not found.is_weighted
    assert found.ids == pytest.approx(sum(map(len, kept)) / len(kept))
    assert found.distinct == pytest.approx(sum(len(set(ids)) for ids in kept) / len(kept))


def test_growth_tells_how_distinct_ids_of_ranks_add_up() -> None:
    one = table("T", 1_000_000, 4)
    same = hb.dist.traffic_of([one], [{"T": torch.arange(100)}] * 3)["T"]
    other = hb.dist.traffic_of([one], [{"T": torch.arange(100) + 100 * n} for n in range(3)])["T"]
    assert (same.distinct_of(8, None), other.distinct_of(8, None)) == (100, 800)
    assert other.distinct_of(8, 500) == 500
    draw = np.random.default_rng(0)
    batches = [{"T": torch.from_numpy(draw.zipf(1.3, 2000) % 10**6)} for _ in range(16)]
    found = hb.dist.traffic_of([one], batches)["T"]
    four = [len(torch.cat([b["T"] for b in batches[n : n + 4]]).unique()) for n in range(0, 16, 4)]
    assert found.distinct_of(4, None) == pytest.approx(sum(four) / 4, rel=0.05)


def test_features_of_a_table_count_together() -> None:
    one = table("T", 100, 4, combiner="sum")
    batch = {"a": torch.tensor([1, 2]), "b": torch.tensor([[2, 3], [4, 5]]), "label": "no ids"}
    found = hb.dist.traffic_of([one], [batch], {"a": "T", "b": "T", "c": "T"})["T"]
    assert found == Traffic(4, 6, 5, 1.0, features=2)
    assert hb.dist.traffic_of([one], [{}]) == {}
    with pytest.raises(PlanError, match="'a' reads the table 'X', which is not there"):
        hb.dist.traffic_of([one], [batch], {"a": "X"})


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.05, 1.5])
@pytest.mark.parametrize("rows", [1, 50, 100_000])
def test_assumed_ids_are_those_of_a_power_law(rows: int, skew: float) -> None:
    found = Traffic.assumed(rows, bags=4000, ids_a_bag=2, skew=skew)
    shares = np.arange(1, rows + 1, dtype=np.float64) ** -skew
    shares /= shares.sum()
    for batches in (1, 2):
        expected = -np.expm1(8000 * batches * np.log1p(-np.minimum(shares, 1 - 1e-12))).sum()
        assert found.distinct_of(batches, rows) == pytest.approx(expected, rel=0.04)
    assert (found.bags, found.ids) == (4000, 8000)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"ids": -1}, "must be from 0"),
        ({"bags": float("nan")}, "must be from 0"),
        ({"distinct": 30}, "more distinct ids than ids"),
        ({"growth": 1.5}, "growth above 1"),
        ({"bags": "1"}, "bags must be from 0 to .*, not '1'"),
        ({"features": None}, "features must be .* not None"),
        ({"ids": True}, "ids must be .* not True"),
        ({"is_weighted": "no"}, "is_weighted must be True or False, not 'no'"),
    ],
)
def test_numbers_that_cannot_be(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Traffic(**{"bags": 10, "ids": 20, "distinct": 5, **wrong})


@pytest.mark.parametrize("wrong", [{"rows": "5"}, {"bags": None}, {"skew": -1}, {"ids_a_bag": "1"}])
def test_assumptions_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(wrong))} must be from 0"):
        Traffic.assumed(**{"rows": 10, **wrong})


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (([5],), hb.InputError, "batches: number 0 must be a dict of inputs by feature, not int 5"),
        ((5,), hb.InputError, "batches must be several dicts of inputs, not int 5"),
        (({"T": [1]},), hb.InputError, "batches must be several dicts"),
        (([{"T": [1]}], ["T"]), PlanError, "features must be a dict feature"),
        (([{"T": [1]}], {"T": ["T"]}), PlanError, r"'T' reads the table \['T'\], which is not"),
    ],
)
def test_samples_that_cannot_be(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        hb.dist.traffic_of([table("T", 10, 4)], *arguments)
    wrong: Any
    for wrong in (5, ["T"], "T"):
        with pytest.raises(PlanError, match="tables must be several hotbed.Table, not"):
            hb.dist.traffic_of(wrong, [])
