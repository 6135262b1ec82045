"""Items drawn as negatives."""

from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.data import PopularItems, uniform_items, with_negatives


def test_uniform_items_are_uniform():
    draw = torch.Generator().manual_seed(0)
    counts = torch.bincount(uniform_items(100_000, 10, generator=draw), minlength=10)
    assert len(counts) == 10 and ((counts - 10_000).abs() < 500).all()
    ids = torch.tensor([7, -3, 2**40])
    drawn = uniform_items(1000, ids, generator=draw)
    assert set(drawn.tolist()) == set(ids.tolist())
    assert uniform_items(0, 5).shape == (0,)
    for wrong in (0, -1, True, 2.5, torch.empty(0, dtype=torch.int64)):
        with pytest.raises(hb.InputError, match="Pass a positive number, or ids"):
            uniform_items(3, wrong)


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_popular_items_are_drawn_by_the_power_of_their_counts(power):
    ids = torch.tensor([5] * 80 + [-9] * 15 + [2**50] * 5)
    items = PopularItems(ids, power)
    weights = torch.tensor([15.0, 80.0, 5.0], dtype=torch.float64) ** power
    assert items.ids.tolist() == [-9, 5, 2**50]
    torch.testing.assert_close(items.probability, weights / weights.sum())
    drawn = items.sample(100_000, generator=torch.Generator().manual_seed(1))
    found = torch.stack([(drawn == id_).double().mean() for id_ in items.ids])
    assert (found - items.probability).abs().max() < 0.01
    with pytest.raises(hb.InputError, match="there are no ids"):
        PopularItems(torch.empty(0, dtype=torch.int64))


def test_negatives_follow_their_positive_samples():
    batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([10, 20]), "dense": torch.eye(2)}
    made = with_negatives(batch, torch.tensor([11, 12, 21, 22]))
    assert made["user"].tolist() == [1, 2, 1, 1, 2, 2]
    assert made["item"].tolist() == [10, 20, 11, 12, 21, 22]
    assert made["label"].tolist() == [1, 1, 0, 0, 0, 0]
    assert torch.equal(made["dense"], torch.eye(2)[[0, 1, 0, 0, 1, 1]])
    with pytest.raises(hb.InputError, match="Pass the same number for each"):
        with_negatives(batch, torch.arange(3))
    with pytest.raises(hb.InputError, match="feature 'other' must be ids"):
        with_negatives(batch, torch.arange(4), "other")


def test_negatives_take_all_that_a_batch_of_files_has():
    bags = hb.Jagged.from_lists([[5], [6, 7]])
    batch = {"seen": bags, "key": ["a", "b"], "item": torch.tensor([10, 20])}
    made: Any = with_negatives(batch, torch.tensor([11, 21]))
    assert made["seen"].to_lists() == [[5], [6, 7], [5], [6, 7]]
    assert made["key"] == ["a", "b", "a", "b"]
    with pytest.raises(hb.InputError, match=r"batch\['user'\] has 1 samples, and 'item' 2"):
        with_negatives(batch | {"user": torch.tensor([1])}, torch.tensor([11, 21]))
    with pytest.raises(hb.InputError, match="must be int64 or int32, got float32"):
        with_negatives(batch, torch.tensor([1.0, 2.0]))


def test_numbers_of_items_that_are_none():
    items = PopularItems(torch.tensor([1, 2]))
    for wrong in (-1, 1.5, "x", True):
        with pytest.raises(hb.InputError, match="uniform_items: count is"):
            uniform_items(wrong, 3)
        with pytest.raises(hb.InputError, match="PopularItems.sample: count is"):
            items.sample(wrong)
    for power in (float("nan"), float("inf"), "x", True):
        with pytest.raises(hb.InputError, match="power is"):
            PopularItems(torch.tensor([1]), power)
    with pytest.raises(hb.InputError, match="must be int64 or int32, got float32"):
        PopularItems(torch.tensor([1.0]))
    with pytest.raises(hb.InputError, match="Pass a positive number"):
        uniform_items(1, 2**70)
