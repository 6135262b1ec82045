"""Loaders whose ranks end together, with an error, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dist.worlds import run

import hotbed as hb
from hotbed.dist import PeerError


class Broken(Exception):
    """The user's own."""


def numbers_of(rank: int, fails: bool) -> Iterator[int]:
    yield 1
    if fails and rank == 1:
        raise Broken("no disk: gloo \udcff")
    yield 2


def fails(rank: int, world: int, end: str) -> None:
    found = []
    with pytest.raises(Broken if rank == 1 else PeerError, match="no disk"):
        for number in hb.dist.even(numbers_of(rank, fails=True), end=end):
            found.append(number)
    assert found == [1]
    assert [*hb.dist.even(numbers_of(rank, fails=False))] == [1, 2]  # ranks are in step


@pytest.mark.process
@pytest.mark.parametrize("end", ["drop", "pad"])
def test_what_a_loader_raises_ends_all_ranks(end: str) -> None:
    run(3, fails, end)


def test_without_a_process_group_there_is_one_rank() -> None:
    batch = {"ids": torch.arange(3), "bags": hb.Jagged.from_lists([[1], [], [2, 3]])}
    (whole,) = hb.dist.slices([batch])
    assert whole.samples == 3 and whole["ids"].tolist() == [0, 1, 2]
    assert whole["bags"].to_lists() == [[1], [], [2, 3]]
    assert [*hb.dist.even([1, 2])] == [1, 2]
    with pytest.raises(hb.InputError, match="got 2 and 3"):
        [*hb.dist.slices([{"a": [1, 2], "b": [1, 2, 3]}])]


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((torch.arange(3), torch.arange(3)), "dicts of inputs by name, got tuple"),
        ({"item": torch.arange(3), "step": torch.tensor(3)}, "'step' of a batch is a single value"),
        ({"item": torch.arange(3), "step": 3}, "'step' of a batch is a single value"),
        ({"item": torch.arange(3), "user": torch.arange(4)}, "same number of samples; got 3 and 4"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, says: str) -> None:
    with pytest.raises(hb.InputError, match=says):
        list(hb.dist.slices([batch]))
