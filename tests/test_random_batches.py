"""Random batches of all input kinds, right and wrong, against the naive twin."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batches import Feature, KeyedInput, collections
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from twin import Twin

import hotbed as hb

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Thousands of tiny batches; what threads do to results is asked in test_collection.py."""
    set_threads(1)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def snapshot(collection: hb.EmbeddingCollection) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: collection.rows(name) for name in collection.tables}


def assert_same_rows(collection: hb.EmbeddingCollection, before: dict[str, Any]) -> None:
    for name, (ids, values) in before.items():
        now = collection.rows(name)
        assert torch.equal(now.ids, ids) and torch.equal(now.values, values), name


def gradient_by_id(collection: hb.EmbeddingCollection, name: str) -> dict[int, Tensor]:
    """id → gradient row, of a table whose handle has a gradient."""
    grad = collection.parameter(name).grad
    assert grad is not None and grad.is_sparse
    ids = collection.table(name).ids()
    grad = grad.coalesce()
    return {int(ids[s]): v for s, v in zip(grad.indices()[0], grad.values(), strict=True)}


def whole_input(batch: list[Feature], keyed: bool) -> Any:
    """The dict of inputs, or where possible a keyed input of the whole batch."""
    inputs = {f.name: f.input for f in batch}
    if not keyed or not all(isinstance(i, hb.Jagged) for i in inputs.values()):
        return inputs
    if len({i.weights is None for i in inputs.values()}) > 1:
        return inputs
    weights = [i.weights.detach().double() for i in inputs.values() if i.weights is not None]
    lengths = torch.cat([i.lengths for i in inputs.values()])
    for feature in batch:
        feature.weight_tensor = None
    return KeyedInput(
        list(inputs),
        torch.cat([i.values.long() for i in inputs.values()]),
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        torch.cat(weights) if weights else None,
    )


def check_batch(collection: hb.EmbeddingCollection, batch: list[Feature], keyed: bool) -> None:
    """Forward and gradients equal the twin's."""
    twin = Twin(collection, batch)
    outputs = collection(whole_input(batch, keyed))
    assert list(outputs) == [f.name for f in batch]
    loss = torch.zeros((), dtype=torch.float64)
    twin_loss = torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    expected = twin.outputs()
    for feature in batch:
        out = outputs[feature.name]
        if isinstance(out, hb.Jagged):
            assert out.lengths.tolist() == [len(bag) for bag in feature.bags]
            out = out.values
        elif feature.table.combiner == "none":
            lengths = () if feature.kind == "single" else (feature.input.shape[-1],)
            assert out.shape == (*feature.lead, *lengths, feature.table.dim)
        else:
            assert out.shape == (*feature.lead, feature.table.dim)
        assert out.dtype == feature.table.compute_dtype
        want = expected[feature.name]
        tolerance = TOLERANCE[feature.table.compute_dtype]
        torch.testing.assert_close(
            out.detach().double().reshape(want.shape), want.detach(), rtol=tolerance, atol=tolerance
        )
        weight = torch.randn(want.shape, generator=generator, dtype=torch.float64)
        loss = loss + (out.double().reshape(want.shape) * weight).sum()
        twin_loss = twin_loss + (want * weight).sum()
    loss.backward()
    if twin_loss.requires_grad:
        twin_loss.backward()
    for name, rows in twin.rows.items():
        found = gradient_by_id(collection, name)
        tolerance = TOLERANCE[collection.tables[name].compute_dtype]
        for k, id in enumerate(twin.ids[name]):
            want = torch.zeros_like(rows[k]) if rows.grad is None else rows.grad[k]
            if id == collection.tables[name].padding_idx:
                assert id not in found
            else:
                got = found.pop(id).double()
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert not found
    for feature in batch:
        if feature.weight_tensor is None or not feature.weight_order:
            continue
        grad = feature.weight_tensor.grad
        assert grad is not None
        tolerance = 50 * TOLERANCE[feature.table.compute_dtype]
        for (b, k), got in zip(feature.weight_order, grad.double(), strict=True):
            leaf = twin.weights[feature.name][b][k].grad
            want = torch.zeros(()).double() if leaf is None else leaf
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@settings(max_examples=examples(400, 75_000))
@given(collections(), st.booleans())
def test_a_right_batch_answers_as_the_twin(
    made: tuple[hb.EmbeddingCollection, list[Feature]], keyed: bool
) -> None:
    collection, batch = made
    collection.eval()
    before = snapshot(collection)
    in_evaluation = collection({f.name: f.input for f in batch})
    assert_same_rows(collection, before)
    collection.train()
    in_training = collection({f.name: f.input for f in batch})
    for name, out in in_training.items():
        a, b = (v.values if isinstance(v, hb.Jagged) else v for v in (out, in_evaluation[name]))
        assert torch.equal(a, b)
    for name, spec in collection.tables.items():
        met = {i for f in batch if f.table.name == name for bag in f.bags for i in bag}
        if spec.rows is None:
            assert collection.rows(name).ids.tolist() == sorted(met - {spec.padding_idx})
    check_batch(collection, batch, keyed)


def _break(collection: hb.EmbeddingCollection, batch: list[Feature], rng: random.Random) -> Any:
    """A wrong input made from a right one, and what its error must name."""
    inputs: dict[str, Any] = {f.name: f.input for f in batch}
    feature = rng.choice(batch)
    name, size = feature.name, feature.lead[0]
    good = hb.Jagged(torch.zeros(2, dtype=torch.int64), lengths=torch.tensor([2]))
    static = feature.table.rows is not None
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: torch.rand(size), "float32"),
        (lambda: torch.zeros(size, dtype=torch.bool), "bool"),
        (lambda: torch.zeros(size, 2, dtype=torch.uint8), "uint8"),
        (lambda: torch.tensor(3), "batch dimension"),
        (lambda: None, "None"),
        (lambda: {1, 2}, "set"),
        (lambda: [1.5, 2], "float64"),
        (lambda: ["a"], "hash_ids"),
        (lambda: [[1], [2, 3]], "from_lists"),
        (lambda: np.arange(3, dtype=np.int16), "int16"),
        (lambda: [0] * (size + 1), "batch of"),
        (lambda: np.zeros((size + 1, 2), np.int64), "batch of"),
        (lambda: torch.zeros(size, dtype=torch.int64, device="meta"), "meta"),
        (
            lambda: hb.Jagged(torch.zeros(2, 2, dtype=torch.int64), lengths=torch.tensor([2])),
            "(2, 2)",
        ),
        (lambda: hb.Jagged(torch.rand(2), lengths=torch.tensor([2])), "float32"),
        (lambda: KeyedInput(["a", "b"], good.values, torch.tensor([0, 1, 2]), None), "2 keys"),
        (lambda: KeyedInput(["a"], good.values, torch.tensor([]), None), "offsets"),
        (
            lambda: KeyedInput(["a"], good.values, torch.tensor([], dtype=torch.int64), None),
            "offsets",
        ),
        (lambda: KeyedInput(["a"], good.values, [0.0, 2], None), "offsets"),
        (lambda: KeyedInput(["a"], ["b"], torch.tensor([0, 1]), None), "ids"),
        (lambda: torch.zeros(size, 2, 2, dtype=torch.int64).to_sparse(), "sparse"),
        (lambda: torch.nested.nested_tensor([torch.tensor([1])], layout=torch.strided), "nested"),
        (lambda: torch.zeros(size + 1, dtype=torch.int64), "batch of"),
    ]
    if size:
        wrong += [
            (lambda: hb.Jagged(good.values, torch.tensor([0] * size + [3])), "3"),
            (lambda: hb.Jagged(good.values, torch.tensor([0] * size + [1])), "2 values"),
            (lambda: hb.Jagged(good.values, torch.tensor([1] * size + [2])), "start at 1"),
            (lambda: hb.Jagged(good.values, torch.tensor([0] * size + [-2])), "rise"),
            (lambda: hb.Jagged(good.values, lengths=torch.tensor([0] * (size - 1) + [-1])), "rise"),
        ]
    if size > 3:
        lengths = torch.tensor([2**62] * 4 + [2] + [0] * (size - 5))[:size]
        wrong.append((lambda: hb.Jagged(good.values, lengths=lengths), "rise"))
    if feature.table.combiner in ("none", "max"):
        weights = torch.ones(2)
    else:
        weights = torch.ones(2, dtype=torch.complex64)
    wrong.append((lambda: hb.Jagged(good.values, good.offsets, weights=weights), "weights"))
    if static and size:
        rows = feature.table.rows
        assert rows is not None
        outside = rng.choice([-1, rows, 2**62, -(2**63), rows + 2**32])
        ids = torch.zeros(size, 3, dtype=torch.int64)
        at = rng.randrange(size)
        ids[at, rng.randrange(3)] = outside
        wrong += 8 * [(lambda: ids, f"sample {at}: id {outside} is outside [0, {rows})")]
    make, says = rng.choice(wrong)
    value = make()
    change = rng.randrange(12)
    if change == 0:
        del inputs[name]
        return inputs, [name, "missing"]
    if change == 1:
        inputs["other"] = value
        return inputs, ["other", "unknown"]
    if says == "batch of" and len(batch) == 1:
        return 7, ["int"]
    inputs[name] = value
    return inputs, ([repr(name), says] if says != "batch of" else [says, str(size)])


@settings(max_examples=examples(200, 25_000))
@given(collections(), st.integers(0, 2**32))
def test_a_wrong_batch_is_refused_and_changes_nothing(
    made: tuple[hb.EmbeddingCollection, list[Feature]], seed: int
) -> None:
    collection, batch = made
    inputs, says = _break(collection, batch, random.Random(seed))
    before = snapshot(collection)
    with pytest.raises(hb.InputError) as caught:
        collection(inputs)
    for part in says:
        assert part in str(caught.value)
    assert_same_rows(collection, before)
    assert all(p.grad is None for p in collection.parameters())
    check_batch(collection, batch, keyed=False)
