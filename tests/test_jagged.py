"""A `Jagged` as a sequence of bags: against lists of Python's lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

import hotbed as hb

Bags = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4), max_size=6)


def jagged_of(bags: list[list[int]], dtype: torch.dtype, weighted: bool, first: int = 0) -> Any:
    """Weights are the numbers of the values, so that they show where they have come from. `first`: values
    that lie before those of the first bag, in the memory of a larger tensor."""
    values = torch.tensor([0] * first + [one for bag in bags for one in bag], dtype=dtype)[first:]
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    weights = torch.arange(len(values)).float() if weighted else None
    return hb.Jagged(values, lengths=lengths, weights=weights)


def weights_of(jagged: Any) -> list[list[float]] | None:
    if jagged.weights is None:
        return None
    return hb.Jagged(jagged.weights, jagged.offsets).to_lists()


def check(found: Any, jagged: Any, wanted: list[int], bags: list[list[int]]) -> None:
    """`found` are the bags of `jagged` at the positions `wanted`."""
    assert isinstance(found, hb.Jagged)
    assert found.to_lists() == [bags[at] for at in wanted]
    assert len(found) == len(wanted) and found.offsets[0] == 0
    assert found.values.dtype == jagged.values.dtype and found.offsets.dtype == torch.int64
    if jagged.weights is None:
        assert found.weights is None
    else:
        of_all = weights_of(jagged)
        assert of_all is not None
        assert weights_of(found) == [of_all[at] for at in wanted]


Position = st.integers(-8, 8)
MaybePosition = st.none() | Position


@given(
    Bags,
    st.sampled_from([torch.int64, torch.int32]),
    st.booleans(),
    st.builds(slice, MaybePosition, MaybePosition, st.none() | Position.filter(bool)),
    st.data(),
)
@settings(deadline=None)
def test_bags_are_chosen_as_from_a_list(
    bags: list[list[int]], dtype: torch.dtype, weighted: bool, part: slice, data: Any
) -> None:
    jagged = jagged_of(bags, dtype, weighted, first=data.draw(st.integers(0, 2)))
    count = len(bags)
    assert len(jagged) == count and jagged.to_lists() == bags
    assert [bag.tolist() for bag in jagged] == bags
    check(jagged[part], jagged, [*range(count)][part], bags)
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    chosen = [at for at, wanted in enumerate(mask) if wanted]
    check(jagged[torch.tensor(mask, dtype=torch.bool)], jagged, chosen, bags)
    check(jagged[np.array(mask, dtype=bool)], jagged, chosen, bags)
    if count:
        check(jagged[mask], jagged, chosen, bags)
    within = st.integers(-count, max(0, count - 1))
    some = data.draw(st.lists(within, max_size=6 if count else 0))
    check(jagged[some], jagged, some, bags)
    for kind in (torch.int64, torch.int32):
        check(jagged[torch.tensor(some, dtype=kind)], jagged, some, bags)
    check(jagged[np.array(some, dtype=np.int64)], jagged, some, bags)
    for at in some:
        assert jagged[at].tolist() == bags[at] and jagged[at].dtype == dtype
        assert jagged[np.int32(at)].tolist() == jagged[torch.tensor(at)].tolist() == bags[at]
    for beyond in (count, -count - 1):
        for index in (beyond, [beyond], torch.tensor([*some, beyond])):
            with pytest.raises(IndexError, match=f"bag {beyond} of {count}"):
                jagged[index]


@given(Bags, st.integers(-5, 5), st.none() | st.integers(0, 5), st.booleans())
@settings(deadline=None)
def test_shorter_bags_are_padded(
    bags: list[list[int]], padding: int, length: int | None, narrow: bool
) -> None:
    jagged = jagged_of(bags, torch.int32 if narrow else torch.int64, True)
    longest = max(map(len, bags), default=0) if length is None else length
    wanted = [(bag + [padding] * longest)[:longest] for bag in bags]
    found = jagged.to_padded(padding, length)
    assert found.shape == (len(bags), longest) and found.tolist() == wanted
    assert found.dtype == jagged.values.dtype
    of_all = weights_of(jagged)
    assert of_all is not None
    weights = hb.Jagged(jagged.weights, jagged.offsets).to_padded(0.5, length)
    assert weights.tolist() == [(bag + [0.5] * longest)[:longest] for bag in of_all]


def test_vectors_and_weights_pass_their_gradients_on() -> None:
    vectors, weights = torch.rand(4, 2, requires_grad=True), torch.rand(4, requires_grad=True)
    jagged = hb.Jagged(vectors, lengths=[1, 3, 0], weights=weights)
    chosen = jagged[[1, 1, 2]]
    assert chosen.values.shape == (6, 2) and chosen.weights is not None
    (chosen.values.sum() + 3 * chosen.weights.sum() + jagged[:1].values.sum()).backward()
    assert vectors.grad is not None and weights.grad is not None
    assert vectors.grad.tolist() == [[1, 1], [2, 2], [2, 2], [2, 2]]
    assert weights.grad.tolist() == [0, 6, 6, 6]
    vectors.grad = None
    padded = jagged.to_padded(-1.0, 2)
    assert padded.shape == (3, 2, 2) and padded[0, 1].tolist() == padded[2, 0].tolist() == [-1, -1]
    (gradient,) = torch.autograd.grad(padded.sum(), vectors)
    assert gradient.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_what_cannot_choose_bags() -> None:
    jagged = hb.Jagged.from_lists([[1, 2], [], [7]])
    for index in (None, ..., True, 1.0, "a", (0, 1), {0}, [[0], [1]], [0.5], [None]):
        with pytest.raises(hb.InputError, match="Jagged"):
            jagged[index]
    for mask in ([True], torch.ones(4, dtype=torch.bool), np.ones((3, 1), bool)):
        with pytest.raises(hb.InputError, match=r"a mask of 3 bags must have the shape \(3,\)"):
            jagged[mask]
    nowhere: Any = torch.tensor(1, device="meta")
    for part in (slice("a", "b"), slice(0, 2, 0), slice(nowhere)):
        with pytest.raises(hb.InputError, match="a slice must be of ints"):
            jagged[part]
    with pytest.raises(hb.InputError, match="dense tensor with data"):
        jagged[nowhere]
    for padding in (0.5, float("nan"), 2**70, None, "a", [1, 2]):
        with pytest.raises(hb.InputError, match="padding must be one int64 number"):
            jagged.to_padded(padding)
    for length in (-1, 1.5, "2", True, nowhere):
        with pytest.raises(hb.InputError, match="length must be an int of at least 0"):
            jagged.to_padded(0, length)


@pytest.mark.parametrize("offsets", [[0, 3, 1], [0, 1, 9], [-1, 0, 2]])
def test_offsets_that_do_not_fit_choose_nothing(offsets: list[int]) -> None:
    jagged = hb.Jagged(torch.tensor([1, 2, 3]), torch.tensor(offsets))
    for read in (
        jagged.to_lists,
        lambda: jagged[[1]],
        lambda: jagged.to_padded(0),
        lambda: [*jagged],
    ):
        with pytest.raises(hb.InputError, match="offsets must rise from 0 to 3"):
            read()
    with pytest.raises(hb.InputError, match="meta"):
        jagged.to("meta")[0]


def test_values_without_data() -> None:
    jagged = hb.Jagged(torch.empty(3, device="meta"), [0, 2, 3])
    assert len(jagged[[1]].values) == 1 and jagged.to_padded(0).shape == (2, 2)
    with pytest.raises(hb.InputError, match="its values are on meta"):
        jagged.to_lists()


def test_the_chosen_bags_look_up_as_they_would_alone() -> None:
    layer = hb.EmbeddingBag(50, 3, mode="sum")
    jagged = hb.Jagged.from_lists([[1, 2], [], [7], [3, 3]], [[1.0, 2.0], [], [0.5], [1.0, 4.0]])
    every = layer(jagged)
    for index in (slice(1, 3), [3, 0], torch.tensor([True, False, True, True])):
        assert torch.equal(layer(jagged[index]), every[index])


class Samples(torch.utils.data.Dataset[Any]):
    """Four samples cut out of one Jagged."""

    def __init__(self) -> None:
        self.jagged = hb.Jagged.from_lists([[1, 2], [], [7], [3, 3, 3]])

    def __len__(self) -> int:
        return len(self.jagged)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"bag": self.jagged[at : at + 1], "label": float(at)}


def test_it_is_one_value_of_a_batch_and_no_container() -> None:
    loader: Any = DataLoader(Samples(), batch_size=3)
    embeddings = hb.EmbeddingCollection([hb.Table("bag", 2)])
    batches = [*hb.lookahead(loader, embeddings)]
    assert [batch["bag"].to_lists() for batch in batches] == [[[1, 2], [], [7]], [[3, 3, 3]]]
    nested = default_collate([({"bag": hb.Jagged.from_lists([[n]])}, n) for n in range(3)])
    assert nested[0]["bag"].to_lists() == [[0], [1], [2]]
    # As a dataset its samples are its bags.
    bags: Any = DataLoader(hb.Jagged.from_lists([[1, 2], [3, 4]]), batch_size=2)
    assert [batch.tolist() for batch in bags] == [[[1, 2], [3, 4]]]


def test_a_bag_and_a_slice_are_no_copies() -> None:
    values = torch.arange(5)
    jagged = hb.Jagged(values, lengths=[2, 3])
    assert jagged[1].data_ptr() == values[2:].data_ptr()
    assert jagged[1:].values.data_ptr() == values[2:].data_ptr()


def test_bags_are_selected_whatever_the_default_device() -> None:
    bags = hb.Jagged.from_lists([[1, 2], [], [3, 4, 5]])
    with torch.device("meta"):
        found = bags[[2, 0]], bags[::-2], bags[torch.tensor([True, False, True], device="cpu")]
        padded = bags.to_padded(0)
    assert [one.to_lists() for one in found] == [[[3, 4, 5], [1, 2]]] * 2 + [[[1, 2], [3, 4, 5]]]
    assert padded.tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [1, 2]])
def test_offsets_that_leave_values_out(offsets: list[int]) -> None:
    jagged = hb.Jagged([7, 8, 9], offsets)
    for read in (
        hb.Jagged.to_lists,
        list,
        lambda j: j.to_padded(0),
        lambda j: j[0],
        lambda j: j[:],
    ):
        with pytest.raises(hb.InputError, match="rise from 0 to 3"):
            read(jagged)


def test_padding_that_memory_does_not_hold() -> None:
    jagged = hb.Jagged(torch.zeros(10**6, dtype=torch.int64), lengths=[10**6, *[0] * (10**6)])
    with pytest.raises(hb.InputError, match=r"no memory for \(1000001, 1000000\).*length="):
        jagged.to_padded(0)
    for length in (2**62, 2**70):
        with pytest.raises(hb.InputError, match=f"no memory for .*, {length}\\)"):
            jagged.to_padded(0, length)
    assert hb.Jagged([], [0]).to_padded(0, 2**62).shape == (0, 2**62)
    assert jagged.to_padded(5, length=1).shape == (10**6 + 1, 1)
