"""Where a row lives never changes a result: trainings in tiers against trainings without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from effort import examples
from hypothesis import given, settings
from resolve.small_logs import small_logs
from resolve.tiered_training import Run, assert_same, runs, train, train_in_tiers


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Thousands of tiny batches."""
    set_threads(1)


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    with small_logs():
        yield


@pytest.mark.filterwarnings("ignore:The budget holds")
@settings(max_examples=examples(60, 1500))
@given(run=runs(("device over host",)))
def test_training_in_tiers_is_training(run: Run) -> None:
    assert_same(train_in_tiers(run), train(run, None))


@pytest.mark.filterwarnings("ignore:The budget holds")
@settings(max_examples=examples(15, 600))
@given(run=runs(("host over ssd", "device over host over ssd")))
def test_training_over_ssd_is_training(run: Run) -> None:
    assert_same(train_in_tiers(run), train(run, None))
