"""Inputs one by one: what each kind means and what each mistake is told."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from batches import KeyedInput
from torch import Tensor
from torch.utils.data import DataLoader

import hotbed as hb
from hotbed.inputs.bags import read_bags
from hotbed.inputs.keyed import split_keyed

ids = torch.tensor


def make(combiner: str = "sum", rows: int | None = 10) -> hb.EmbeddingCollection:
    return hb.EmbeddingCollection(
        [hb.Table("item", 2, rows, combiner), hb.Table("user", 2)],
        {"watched": "item", "user": "user"},
        seed=0,
    )


def test_lengths_and_offsets_mean_the_same() -> None:
    by_lengths = hb.Jagged(ids([1, 2, 3]), lengths=ids([2, 0, 1]))
    by_offsets = hb.Jagged(ids([1, 2, 3]), ids([0, 2, 2, 3]))
    assert by_lengths.offsets.tolist() == by_offsets.offsets.tolist() == [0, 2, 2, 3]
    assert by_offsets.lengths.tolist() == [2, 0, 1]
    assert [bag.tolist() for bag in by_lengths] == [[1, 2], [], [3]]
    assert by_lengths[-1].tolist() == [3]
    with pytest.raises(IndexError):
        by_lengths[3]


def test_lists_make_a_jagged() -> None:
    made = hb.Jagged.from_lists([[1, 2], [], [7]], [[0.5, 1.0], [], [2.0]])
    assert made.values.tolist() == [1, 2, 7] and made.offsets.tolist() == [0, 2, 2, 3]
    assert made.weights is not None and made.weights.tolist() == [0.5, 1.0, 2.0]
    assert len(hb.Jagged.from_lists([])) == 0
    with pytest.raises(hb.InputError, match="as many weights"):
        hb.Jagged.from_lists([[1, 2], [3]], [[1.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "exactly one"),
        ({"offsets": ids([0]), "lengths": ids([0])}, "exactly one"),
        ({"lengths": torch.tensor([1.5, 1.5])}, "lengths must be a 1-D int64"),
        ({"offsets": torch.zeros(1, 1, dtype=torch.int64)}, "offsets must be a 1-D int64"),
        ({"offsets": [[0, 3]]}, "offsets must be a 1-D int64"),
        ({"offsets": [0.0, 3.0]}, "offsets must be int64 or int32, got float64"),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, "got 0"),
        ({"offsets": ids([0, 3]), "weights": torch.ones(2)}, "one weight an id"),
        ({"offsets": ids([0, 3]), "weights": [1.0, 1.0]}, "one weight an id"),
    ],
)
def test_what_cannot_be_a_jagged(arguments: Any, says: str) -> None:
    with pytest.raises(hb.InputError, match=says):
        hb.Jagged(ids([1, 2, 3]), **arguments)


def test_a_jagged_pickles_and_moves() -> None:
    made = hb.Jagged(ids([1, 2, 3]), lengths=ids([2, 1]), weights=torch.ones(3))
    again = pickle.loads(pickle.dumps(made))
    assert again.values.tolist() == [1, 2, 3] and again.offsets.tolist() == [0, 2, 3]
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).weights.tolist() == [1, 1, 1]
    assert made.to("meta").offsets.device.type == "meta"
    assert made.to(torch.device("cpu"), non_blocking=True).values.tolist() == [1, 2, 3]
    with pytest.raises(hb.InputError, match="float16"):
        made.to(torch.float16)


class Bags(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"watched": hb.Jagged.from_lists([list(range(i))]), "label": float(i)}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_a_loader_collates_jagged_samples(workers: int) -> None:
    batches = list(DataLoader(Bags(), batch_size=4, num_workers=workers))
    assert [len(b["watched"]) for b in batches] == [4, 2]
    assert batches[0]["watched"].values.tolist() == [0, 0, 1, 0, 1, 2]
    assert batches[1]["watched"].lengths.tolist() == [4, 5]
    with pytest.raises(hb.InputError, match="some have none"):
        hb.Jagged.concatenate([hb.Jagged.from_lists([[1]]), hb.Jagged.from_lists([[1]], [[1.0]])])


USER = ids([1, 2])


@pytest.mark.parametrize(
    ("watched", "error", "says"),
    [
        (
            ids([3, 10]),
            hb.IdError,
            r"Table 'item', feature 'watched', sample 1: id 10 is outside \[0, 10\).*rows=None",
        ),
        (ids([-1, 0]), hb.IdError, r"sample 0: id -1 is outside \[0, 10\)"),
        (ids([[0, 1], [2, 99]], dtype=torch.int32), hb.IdError, r"sample 1: id 99"),
        (torch.full((2, 3, 4), 11), hb.IdError, r"sample 0: id 11"),
        (
            torch.cat([torch.zeros(1, 3, 4), torch.full((1, 3, 4), 11.0)]).long(),
            hb.IdError,
            r"sample 1: id 11",
        ),
        (hb.Jagged(ids([1, 2, 77]), lengths=ids([0, 3])), hb.IdError, r"sample 1: id 77"),
        (hb.Jagged(ids([77]), lengths=ids([0, 1])), hb.IdError, r"sample 1: id 77"),
        (
            hb.Jagged(ids([1, 2, 3]), lengths=ids([1, 1])),
            hb.InputError,
            r"'watched'.* end at 2 .*there are 3 values",
        ),
        (
            hb.Jagged(ids([1, 2, 3]), ids([0, 4, 3])),
            hb.InputError,
            r"sample 1.*rise, but 3 follows 4",
        ),
        (hb.Jagged(ids([1, 2, 3]), ids([1, 2, 3])), hb.InputError, r"'watched'.*start at 1"),
        (
            torch.tensor([1.0, 2.0]),
            hb.InputError,
            r"'watched'.*int64 or int32, got float32.*long\(\)",
        ),
        (torch.tensor([True, False]), hb.InputError, r"'watched'.*got bool"),
        (torch.tensor(1), hb.InputError, r"'watched'.*batch dimension"),
        (ids([1, 2, 3]), hb.InputError, r"'user' has a batch of 2, feature 'watched' of 3"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_mistake_is_named_and_changes_nothing(
    watched: Any, error: type[Exception], says: str, training: bool
) -> None:
    collection = make().train(training)
    before = collection.rows("item").values
    with pytest.raises(error, match=says):
        collection({"watched": watched, "user": USER})
    assert collection.count("user") == 0
    assert torch.equal(collection.rows("item").values, before)


def test_missing_and_unknown_features_are_named() -> None:
    collection = make()
    with pytest.raises(hb.InputError, match="'user' is missing; the batch has 'watched'"):
        collection({"watched": USER})
    with pytest.raises(hb.InputError, match="'other' is unknown; this collection has 'watched'"):
        collection({"watched": USER, "user": USER, "other": USER})
    with pytest.raises(hb.InputError, match="'user' is missing; the batch has 'watched', 'users'"):
        collection({"watched": USER, "users": USER})
    with pytest.raises(hb.InputError, match="not Tensor"):
        collection(USER)


@pytest.mark.parametrize("combiner", ["none", "max"])
def test_weights_need_a_combiner_that_weighs(combiner: str) -> None:
    weighted = hb.Jagged(ids([1, 2]), lengths=ids([1, 1]), weights=torch.ones(2))
    with pytest.raises(hb.InputError, match=f"'watched': weights need .* not {combiner}"):
        make(combiner)({"watched": weighted, "user": USER})


def test_a_keyed_input_is_split_by_key() -> None:
    keyed = KeyedInput(["a", "b"], ids([1, 2, 3, 4]), ids([0, 1, 1, 3, 4]), torch.arange(4.0))
    parts = split_keyed(keyed)
    assert parts is not None and list(parts) == ["a", "b"]
    assert parts["a"].values.tolist() == [1] and parts["a"].lengths.tolist() == [1, 0]
    assert parts["b"].values.tolist() == [2, 3, 4] and parts["b"].lengths.tolist() == [2, 1]
    assert parts["b"].weights is not None and parts["b"].weights.tolist() == [1, 2, 3]
    empty = split_keyed(KeyedInput(["a", "b"], ids([]).long(), ids([0]), None))
    assert empty is not None and len(empty["a"]) == len(empty["b"]) == 0
    assert split_keyed({"a": 1}) is None and split_keyed(7) is None


@pytest.mark.parametrize(
    ("keys", "values", "offsets", "says"),
    [
        (["a", "b"], [1, 2, 3], [0, 1, 2], "run from 0 to 3.*from 0 to 2"),
        (["a", "b"], [1, 2], [1, 1, 2], "'a'.*from 1 to 2"),
        (["a", "b"], [1, 2], [0, 1, 1, 2], "2 keys and 3 lengths; every key must have as many"),
        (["a", "a"], [1, 2], [0, 1, 2], "a key twice"),
        (["a", "b"], [1, 2], [0, 3, 2], "'a': offsets run from 0 to 3"),
        ([], [1, 2], [0, 2], "0 keys"),
    ],
)
def test_a_wrong_keyed_input_is_refused(
    keys: list[str], values: list[int], offsets: list[int], says: str
) -> None:
    with pytest.raises(hb.InputError, match=says):
        split_keyed(KeyedInput(keys, ids(values), ids(offsets), None))


def test_batches_of_different_sizes_in_a_keyed_input_are_refused() -> None:
    class Variable(KeyedInput):
        def variable_stride_per_key(self) -> bool:
            return True

        def stride_per_key(self) -> list[int]:
            return [1, len(self.offsets()) - 2]

    # Whether the lengths happen to be a multiple of the keys, or not.
    for offsets, size in ([0, 1, 2], 1), ([0, 1, 2, 2], 2), ([0, 1, 2, 2, 2], 3):
        with pytest.raises(hb.InputError, match=f"different sizes: 1 of 'a', {size} of 'b'"):
            split_keyed(Variable(["a", "b"], ids([1, 2]), ids(offsets), None))


@pytest.mark.parametrize("form", [lambda t: t.numpy(), lambda t: t.tolist(), lambda t: t.int()])
def test_a_keyed_input_may_be_made_of_arrays(form: Any) -> None:
    parts = ids([1, 2, 3]), ids([0, 1, 3]), torch.tensor([1.0, 0.5, 2.0])
    collection = make()
    want = collection(KeyedInput(["watched", "user"], *parts))
    given = form(parts[0]), form(parts[1]), parts[2].tolist()
    got = collection(KeyedInput(["watched", "user"], *given))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_weights_of_a_keyed_input_are_used_or_refused() -> None:
    keyed = KeyedInput(["watched", "user"], ids([1, 2, 3]), ids([0, 1, 3]), ids([1.0, 0.5, 2.0]))
    collection = make()
    want = {
        name: hb.Jagged(part.values, part.offsets, weights=part.weights)
        for name, part in (split_keyed(keyed) or {}).items()
    }
    for name, vectors in collection(keyed).items():
        assert torch.equal(vectors, collection(want)[name])
    assert not torch.equal(
        collection(keyed)["user"], collection({**want, "user": ids([[2, 3]])})["user"]
    )
    with pytest.raises(hb.InputError, match="not max; give the ids without weights"):
        make("max")(keyed)


def narrowed(values: Tensor) -> Tensor:
    return torch.nested.narrow(values, 1, ids([0, 1, 0]), ids([2, 1, 0]), layout=torch.jagged)


def test_a_narrowed_nested_tensor_has_holes() -> None:
    nested = narrowed(ids([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    bags = read_bags("f", nested, torch.float32, "sum")
    assert bags.offsets is not None
    assert bags.offsets.tolist() == [0, 2, 3, 3] and bags.ids.tolist() == [1, 2, 5]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_with_more_than_numbers_are_refused() -> None:
    collection = make()
    hybrid = torch.sparse_coo_tensor(
        ids([[0, 1], [1, 2]]), torch.ones(2, 3), (2, 10, 3), check_invariants=True
    )
    with pytest.raises(hb.InputError, match="dense dimensions"):
        collection({"watched": hybrid, "user": USER})
    values = torch.ones(2, requires_grad=True)
    for sparse in (
        torch.sparse_coo_tensor(ids([[0, 1], [1, 2]]), values, (2, 10), check_invariants=True),
        torch.sparse_csr_tensor(
            ids([0, 1, 2]), ids([1, 2]), values, (2, 10), check_invariants=True
        ),
    ):
        with pytest.raises(hb.InputError, match="cannot pass a gradient"):
            collection({"watched": sparse, "user": USER})
        with torch.no_grad():
            assert collection({"watched": sparse, "user": USER})["watched"].shape == (2, 2)
    far = torch.ops.aten._sparse_coo_tensor_unsafe(ids([[0, 7], [1, 2]]), torch.ones(2), (2, 10))
    with pytest.raises(hb.InputError, match="of 2 samples has an entry for sample 7"):
        collection({"watched": far, "user": USER})


def test_a_keyed_input_on_meta_is_refused() -> None:
    keyed = KeyedInput(["watched", "user"], ids([1, 2, 3]), ids([0, 1, 1, 2, 3]), None)
    assert make()(keyed)["user"].shape == (2, 2)
    there = KeyedInput(keyed.keys(), keyed.values().to("meta"), keyed.offsets().to("meta"), None)
    for model in (make(), hb.EmbeddingCollection([*make().tables.values()], device="meta")):
        with pytest.raises(hb.InputError, match="A keyed input has its offsets on meta"):
            model(there)
    only_values = KeyedInput(keyed.keys(), keyed.values().to("meta"), keyed.offsets(), None)
    with pytest.raises(hb.InputError, match="'watched': ids are on meta"):
        make()(only_values)
