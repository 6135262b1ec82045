"""NumPy arrays and lists where tensors are meant: what they mean, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb
from hotbed.arrays import id_tensor, real_tensor

ids = torch.tensor


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array: Any) -> Any:
    """The same values, one byte off."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = np.ndarray(array.shape, array.dtype, buffer=memory, offset=1)
    moved[...] = array
    return moved


class Series:
    """As a column of a data frame: no array, but it gives one."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array


FORMS = {
    "array": lambda a: a,
    "list": lambda a: a.tolist(),
    "tuple": lambda a: tuple(a.tolist()),
    "reversed twice": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "strided": lambda a: np.stack([a, np.full_like(a, 99)], -1)[..., 0],
    "read-only": read_only,
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "unaligned": unaligned,
    "series": Series,
    "columns first": np.asfortranarray,
    "expanded": lambda a: np.broadcast_to(a, a.shape),
}


@settings(max_examples=examples(100))
@given(
    st.sampled_from(sorted(FORMS)),
    st.sampled_from((np.int64, np.int32)),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(0, 2**16),
)
def test_every_form_is_the_tensor(form: str, dtype: Any, shape: list[int], seed: int) -> None:
    assume(form not in ("list", "tuple") or 0 not in shape[:-1])  # which lists do not keep
    array = np.random.default_rng(seed).integers(0, 10, shape).astype(dtype)
    given = FORMS[form](array)
    tensor = torch.from_numpy(array.copy())
    collection = hb.EmbeddingCollection([hb.Table("item", 3, 10)], seed=0)
    layer, bag = hb.Embedding(10, 3), hb.EmbeddingBag(10, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = collection({"item": given})["item"]
        assert torch.equal(made, collection({"item": tensor})["item"])
        assert torch.equal(layer(given), layer(tensor))
        if len(shape) == 2:
            assert torch.equal(bag(given), bag(tensor))
        if len(shape) == 1:
            assert torch.equal(collection.lookup("item", given), collection.lookup("item", tensor))
            assert torch.equal(bag(given, [0]), bag(tensor, ids([0])))
            jagged = hb.Jagged(given, lengths=np.array([len(array), 0]))
            assert torch.equal(jagged.values, tensor.to(jagged.values.dtype))
            assert torch.equal(collection({"item": jagged})["item"][1], torch.zeros(3))


def test_an_array_shares_its_memory_where_it_can() -> None:
    array = np.arange(4)
    assert id_tensor("x", array).data_ptr() == array.ctypes.data
    assert real_tensor("x", "rows", array.astype(float)).dtype == torch.float64
    assert id_tensor("x", read_only(array)).data_ptr() % 8 == 0
    assert id_tensor("x", unaligned(array)).data_ptr() % 8 == 0


def test_a_memory_mapped_file_is_read(tmp_path: Path) -> None:
    np.arange(10).tofile(tmp_path / "ids")
    layer = hb.Embedding(10, 2)
    for mode in ("r", "r+", "c"):
        mapped = np.memmap(tmp_path / "ids", np.int64, mode)
        assert torch.equal(layer(mapped[3:7]), layer(torch.arange(3, 7)))
    packed = np.zeros(5, dtype=[("flag", "u1"), ("id", "<i8")])  # fields that are not aligned
    packed["id"] = np.arange(5)
    assert torch.equal(layer(packed["id"]), layer(torch.arange(5)))


def test_empty_lists_are_ids() -> None:
    collection = hb.EmbeddingCollection([hb.Table("item", 3)], seed=0)
    assert collection({"item": []})["item"].shape == (0, 3)
    assert collection({"item": [[], []]})["item"].tolist() == [[0] * 3] * 2
    assert collection.lookup("item", []).shape == (0, 3)
    assert len(hb.Jagged.from_lists([[], []])) == 2


def test_a_new_id_from_a_list_gets_a_row() -> None:
    collection = hb.EmbeddingCollection([hb.Table("user", 3)], seed=0)
    collection({"user": [-(2**63), 2**63 - 1]})["user"].sum().backward()
    assert collection.rows("user").ids.tolist() == [-(2**63), 2**63 - 1]
    collection.assign("user", [7], [[1.0, 2.0, 3.0]])
    assert collection.lookup("user", np.array([7])).tolist() == [[1, 2, 3]]


def test_float64_rows_are_assigned_as_they_are() -> None:
    collection = hb.EmbeddingCollection([hb.Table("user", 1, dtype=torch.float64)], seed=0)
    collection.assign("user", [7], [[0.1]])
    assert collection.lookup("user", [7]).item() == 0.1


WRONG = [
    (["x", "y"], "the string 'x'.*hotbed.data.hash_ids"),
    ("abc", "the string 'abc'.*hotbed.data.hash_ids"),
    (np.array([b"x"]), "the string b'x'.*hash_ids"),
    ([1, "x"], "the string '1'.*hash_ids"),
    (np.array([1, "x"], object), "the string 'x'.*hash_ids"),
    ([[1, 2], [3]], "lists of different lengths.*Jagged.from_lists"),
    ([ids([1, 2]), ids([3])], "lists of different lengths.*Jagged.from_lists"),
    ([1.0], r"got float64; convert them with \.astype"),
    (np.array([1.5], np.float32), "got float32"),
    ([True], "got bool"),
    ([1, None], "got None"),
    (np.array([1, np.nan], object), "got float nan"),
    (np.array([1, 2], object), "got object; convert"),
    ([2**63], "got 9223372036854775808"),
    ([2**64], "got 18446744073709551616"),
    (np.array([1], np.uint64), "got uint64; convert"),
    (np.array([1], np.int16), "got int16; convert"),
    (np.array(["2020-01-01"], "datetime64[D]"), "got datetime64"),
    (np.ma.array([1, 2], mask=[0, 1]), "a masked array.*filled"),
    ([torch.ones(1, requires_grad=True)], "NumPy says"),
    (ids([1.0]), r"got float32; convert them with \.long"),
]


@pytest.mark.parametrize(("value", "says"), WRONG, ids=[says[:25] for _, says in WRONG])
def test_what_cannot_be_ids(value: Any, says: str) -> None:
    collection = hb.EmbeddingCollection([hb.Table("item", 3)], seed=0)
    for call in (
        lambda: collection({"item": value}),
        lambda: collection.lookup("item", value),
        lambda: collection.assign("item", value, torch.zeros(2, 3)),
        lambda: hb.Embedding(None, 3)(value),
        lambda: hb.EmbeddingBag(None, 3)(value, [0]),
    ):
        with pytest.raises(hb.InputError, match=says):
            call()
    assert collection.count() == 0


def test_strings_of_numpys_own_type_are_refused() -> None:
    dtypes = pytest.importorskip("numpy.dtypes")
    if not hasattr(dtypes, "StringDType"):
        pytest.skip("NumPy has no StringDType before 2.0")
    with pytest.raises(hb.InputError, match="the string 'x'.*hash_ids"):
        hb.Embedding(4, 3)(np.array(["x"], dtypes.StringDType()))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    "tensor",
    [
        ids([1, 2]).to_sparse(),
        torch.nested.nested_tensor([ids([1, 2])], layout=torch.jagged),
        torch.zeros(2, dtype=torch.int64, device="meta"),
    ],
    ids=["sparse", "nested", "meta"],
)
def test_tensors_without_plain_data_are_refused(tensor: Tensor) -> None:
    collection = hb.EmbeddingCollection([hb.Table("item", 3)], seed=0)
    with pytest.raises(hb.InputError, match="Table 'item': ids must be a dense tensor with data"):
        collection.lookup("item", tensor)
    with pytest.raises(hb.InputError, match="Table 'item': rows must be a dense tensor with data"):
        collection.assign("item", [1, 2], tensor)


def test_parts_of_a_jagged_must_be_dense() -> None:
    for part in range(3):
        parts: list[Any] = [ids([1, 2]), ids([0, 2]), torch.ones(2)]
        parts[part] = parts[part].to_sparse()
        with pytest.raises(hb.InputError, match="Jagged: .*dense.* sparse_coo"):
            hb.Jagged(parts[0], parts[1], weights=parts[2])


@pytest.mark.parametrize("value", [ids([1j, 2j]), ["a", "b"], [1j, 2j], None, {1.0, 2.0}], ids=str)
def test_weights_and_rows_are_real_numbers(value: Any) -> None:
    says = "must be real numbers"
    collection = hb.EmbeddingCollection([hb.Table("item", 1)], seed=0)
    with pytest.raises(hb.InputError, match=f"Table 'item': rows {says}"):
        collection.assign("item", [1, 2], value)
    if value is not None:
        with pytest.raises(hb.InputError, match=says):
            collection({"item": hb.Jagged([1, 2], [0, 2], weights=value)})
        with pytest.raises(hb.InputError, match=f"per_sample_weights {says}"):
            hb.EmbeddingBag(4, 2, mode="sum")([[1, 2]], per_sample_weights=value)


def test_weights_of_other_forms() -> None:
    bag = hb.EmbeddingBag(9, 2, mode="sum")
    want = bag(ids([[1, 2]]), per_sample_weights=ids([[0.5, 2.0]]))
    for weights in ([[0.5, 2.0]], np.array([[0.5, 2.0]], np.float16)):
        assert torch.equal(bag([[1, 2]], per_sample_weights=weights), want)
    assert torch.equal(bag(hb.Jagged([1, 2], [0, 2], weights=[0.5, 2.0])), want)
    # Numbers that are stored with the opposite sign, which a view of a conjugate is.
    flipped = ids([0.5 - 1j]).conj().imag
    assert flipped.is_neg() and flipped.is_contiguous()
    for ones in (flipped, [1.0]):
        assert torch.equal(bag(hb.Jagged([1], [0, 1], weights=ones)), bag([[1]]))
    assert torch.equal(bag([[1]], per_sample_weights=flipped[None]), bag([[1]]))


@pytest.mark.parametrize("kind", [hb.Embedding, hb.EmbeddingBag])
def test_weights_that_a_layer_is_made_from(kind: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    for form in (torch.from_numpy, read_only, np.asfortranarray, np.ndarray.tolist):
        layer = kind.from_pretrained(form(array))
        assert layer.dtype == torch.float32 and layer.weight.tolist() == array.tolist()
    assert kind.from_pretrained(array.astype(np.float64)).dtype == torch.float64
    assert kind(3, 2, _weight=array).weight.tolist() == array.tolist()
    for wrong, says in (
        (array[0], r"needs \(rows, dim\) weights, got shape \(2,\)"),
        ([1.0], r"got shape \(1,\)"),
        ([[1.0], [2.0, 3.0]], "from_pretrained: lists of different lengths"),
        ("x", "from_pretrained: weights must be real numbers"),
        (array.astype(np.int64), "dtype must be one of float32"),
        (torch.ones(3, 2).to_sparse(), "from_pretrained: weights must be a dense tensor"),
    ):
        with pytest.raises((hb.TableError, hb.InputError), match=says):
            kind.from_pretrained(wrong)
    with pytest.raises(hb.InputError, match="_weight must be real numbers, got str"):
        kind(3, 2, _weight="x")


def test_lists_of_a_jagged() -> None:
    made = hb.Jagged.from_lists([ids([1, 2]), np.array([3]), (4,), []])
    assert made.values.tolist() == [1, 2, 3, 4] and made.lengths.tolist() == [2, 1, 1, 0]
    for bags, weights, says in (
        ([[1.5]], None, "got float64"),
        ([["x"]], None, "hash_ids"),
        ([1, 2], None, r"a list of lists of ids, got list \[1, 2\]"),
        (7, None, "a list of lists of ids, got int 7"),
        ([[1]], [["x"]], "weights must be real"),
        ([[1]], [1.0], "a list of lists of weights"),
        ([torch.empty(2, device="meta")], None, "a list of lists of ids"),
    ):
        with pytest.raises(hb.InputError, match=f"Jagged.from_lists.*{says}"):
            hb.Jagged.from_lists(bags, weights)


def test_integers_that_only_64_bits_without_a_sign_hold_are_numbers() -> None:
    collection = hb.EmbeddingCollection([hb.Table("item", 2)], seed=0)
    collection.assign("item", [1], [[2**63, 2**64 - 1]])
    assert collection.lookup("item", [1]).tolist() == [[2.0**63, 2.0**64]]
    assert hb.Jagged([1], [0, 1], weights=[2**63]).weights.tolist() == [2**63]


def collection_of(**options: Any) -> hb.EmbeddingCollection:
    return hb.EmbeddingCollection([hb.Table("item", 3, 10)], **options)


OF_INTEGERS: dict[str, Callable[[Any], object]] = {
    "dim": lambda given: hb.Table("item", given),
    "rows": lambda given: hb.Table("item", 3, given),
    "padding_idx": lambda given: hb.Table("item", 3, padding_idx=given),
    "seed": lambda given: collection_of(seed=given),
    "host": lambda given: hb.Storage(host=given),
    "depth": lambda given: collection_of().required({"item": [1]}, depth=given),
    "count": lambda given: collection_of().hottest("item", given),
    "since": lambda given: hb.checkpoint.changes("run", "item", given),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_a_tensor_without_data_is_no_integer(name: str) -> None:
    with pytest.raises(hb.HotbedError, match="tensor"):
        OF_INTEGERS[name](torch.tensor([1], device="meta"))


OF_CHOICES: dict[str, Callable[[Any], object]] = {
    "dtype": lambda given: hb.Table("item", 3, dtype=given),
    "combiner": lambda given: hb.Table("item", 3, combiner=given),
    "missing": lambda given: collection_of().lookup("item", [1], missing=given),
    "mode": lambda given: hb.EmbeddingBag(4, 2, mode=given),
    "dtype of a layer": lambda given: hb.Embedding(4, 2, dtype=given),
    "init": lambda given: hb.EmbeddingBag(4, 2, init=given),
    "form": lambda given: hb.nn.CrossInteraction(4, 1, given),
    "end": lambda given: [*hb.dist.even([], end=given)],
    "placement": lambda given: hb.dist.RowWise(placement=given),
    "strategy": lambda given: hb.plan([hb.Table("item", 3, 10)], 2, strategy=given),
    "on_error": lambda given: hb.data.CriteoLog(__file__, on_error=given),
    "default": lambda given: hb.export(collection_of(), "bundle", sample={}, default=given),
}


@pytest.mark.parametrize("name", OF_CHOICES)
def test_an_array_is_no_choice(name: str) -> None:
    with pytest.raises(hb.HotbedError, match=r"array\(\["):
        OF_CHOICES[name](np.array(["a", "b"]))


OF_LISTS: dict[str, Callable[[Any], object]] = {
    "tables": hb.EmbeddingCollection,
    "layers": hb.EmbeddingCollection.from_layers,
    "names": lambda given: hb.EmbeddingCollection.from_layers([torch.nn.Embedding(2, 2)], given),
    "parts": hb.Jagged.concatenate,
    "tables of a plan": lambda given: hb.plan(given, 2),
    "tables of a plan in a file": lambda given: hb.dist.Plan(given, 2, {}),
    "tables of traffic": lambda given: hb.dist.traffic_of(given, []),
    "batches": lambda given: hb.dist.traffic_of([hb.Table("item", 3)], given),
    "tables of a model": hb.models.DLRM,
    "widths": lambda given: hb.models.DLRMSettings(top=given),
    "chunks": lambda given: hb.checkpoint.write("run", {"item": given}),
    "rows": lambda given: hb.checkpoint.write("run", {}, rows=given),
}


@pytest.mark.parametrize("given", [5, torch.tensor(3), np.array(3)], ids=["int", "tensor", "array"])
@pytest.mark.parametrize("name", OF_LISTS)
def test_what_has_no_elements_is_no_list(
    name: str, given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hb.HotbedError):
        OF_LISTS[name](given)
    assert not list(tmp_path.iterdir())
