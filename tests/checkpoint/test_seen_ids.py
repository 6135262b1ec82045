"""Ids that were seen, against Python's sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.checkpoint.seen_ids import seen_ids

ROWS = 40
IDS = st.lists(st.integers(-3, ROWS + 3), max_size=30)


@given(st.lists(st.tuples(IDS, IDS), max_size=6), st.sampled_from([ROWS, None, 1 << 40]))
def test_they_are_those_that_were_added(
    turns: list[tuple[list[int], list[int]]], rows: int | None
) -> None:
    seen, expected = seen_ids(rows), set[int]()
    for added, asked in turns:
        found = seen.are_new(torch.tensor(asked, dtype=torch.int64))
        assert found.tolist() == [one not in expected for one in asked]
        seen.add(torch.tensor(added, dtype=torch.int64))
        # Ids that no table of so many rows has are refused elsewhere.
        expected |= {one for one in added if rows != ROWS or 0 <= one < ROWS}


@pytest.mark.parametrize("rows", [1 << 27, None])
def test_large_ids(rows: int | None) -> None:
    seen = seen_ids(rows)
    seen.add(torch.tensor([(1 << 27) - 1, 5]))
    assert seen.are_new(torch.tensor([5, 6, (1 << 27) - 1])).tolist() == [False, True, False]
