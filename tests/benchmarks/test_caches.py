"""The rivals of the eviction benchmark, on traces small enough to replay by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch  # noqa: F401  (its libgomp must be loaded before the core's)
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.caches import Fading, LeastFrequent, LeastRecent, Trace, repeat_misses
from benchmarks.eviction import power_law, through_residency

ROWS = 10


def trace_of(batches: list[list[int]]) -> Trace:
    rows = np.arange(ROWS)
    arrays = [np.array(batch, np.int64) for batch in batches]
    return Trace("test", arrays, ROWS, np.zeros(ROWS, np.int64), rows)


def ones(*keys: int) -> list[list[int]]:
    return [[key] for key in keys]


def test_lru_evicts_the_least_recent() -> None:
    # 1 leaves for 3, then 2 for 1, then 3 for 2.
    assert repeat_misses(trace_of(ones(1, 2, 3, 1, 2)), 2, LeastRecent(ROWS)) == 2
    assert repeat_misses(trace_of(ones(1, 2, 1, 3, 1)), 2, LeastRecent(ROWS)) == 0


def test_lfu_forgets_at_eviction_unless_it_remembers() -> None:
    # 1 has two uses and stays; 2 and 3 take turns.
    trace = trace_of(ones(1, 1, 2, 3, 2, 3, 1))
    assert repeat_misses(trace, 2, LeastFrequent(ROWS)) == 2
    # 2 leaves for 3 and returns with one use, or with four; when 3 returns, 2 leaves, or 1.
    trace = trace_of(ones(1, 1, 1, 1, 2, 2, 2, 3, 3, 2, 3, 2))
    assert repeat_misses(trace, 2, LeastFrequent(ROWS)) == 3
    assert repeat_misses(trace, 2, LeastFrequent(ROWS, remembers=True)) == 2


def test_a_faded_use_weighs_less() -> None:
    # 1 was used four times, long ago.
    trace = trace_of(ones(1, 1, 1, 1, 2, 3, 2, 3, 4, 3))
    assert repeat_misses(trace, 2, Fading(ROWS, 1000, True)) > 0
    assert repeat_misses(trace, 2, Fading(ROWS, 0.5, True)) == 0


batches_strategy = st.lists(
    st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=3, unique=True), max_size=7
)


@settings(max_examples=60)
@given(batches_strategy, st.integers(3, 5))
def test_nothing_beats_belady(batches: list[list[int]], capacity: int) -> None:
    assert repeat_misses(
        trace_of(batches), capacity, LeastRecent(ROWS), horizon=np.inf
    ) == fewest_misses(batches, capacity)


def fewest_misses(batches: list[list[int]], capacity: int) -> int:
    """By trying all victims."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    seen: set[int] = set()
    for batch in batches:
        following: dict[frozenset[int], int] = {}
        for state, misses in states.items():
            absent = set(batch) - state
            cost = misses + len(absent & seen)
            leaving = max(0, len(state) + len(absent) - capacity)
            for gone in itertools.combinations(state - set(batch), leaving):
                after = frozenset((state | absent) - set(gone))
                following[after] = min(cost, following.get(after, cost))
        states = following
        seen |= set(batch)
    return min(states.values())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_residency_that_knows_all_is_belady(depth: int) -> None:
    rng = np.random.default_rng(depth)
    rows = 400
    batches = [rng.choice(rows, rng.integers(5, 25), replace=False) for _ in range(80)]
    trace = Trace("test", batches, rows, np.repeat([0, 1], rows // 2), np.arange(rows) * 7)
    ours = through_residency(trace, 75, depth, 100)
    assert ours > 100
    assert ours == repeat_misses(trace, 75, LeastRecent(rows), depth=depth, horizon=np.inf)


def test_power_law_traces_have_distinct_rows_in_order() -> None:
    trace = power_law(3, drift=5)
    assert len(trace.batches) == 3
    for batch in trace.batches:
        assert len(np.unique(batch)) == len(batch)
    numbers = trace.batches[1]
    assert (trace.numbers(trace.tables[numbers], trace.ids[numbers]) == numbers).all()
