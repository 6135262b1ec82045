"""`EmbeddingCollection`: what backward leaves, whatever happened since the forward."""

from __future__ import annotations

import pytest
import torch
from mixed_tables import assert_equal_grads, batch, grads_of, loss_of, mixed
from torch import nn
from torch_twins import dense_grad

import hotbed as hb

ids = torch.tensor


def test_gradients_flow_in_evaluation_too() -> None:
    collection = mixed()
    collection(batch())
    loss_of(collection.eval()(batch())).backward()
    assert grads_of(collection).keys() == {"item", "user", "word", "tag"}


def test_a_frozen_table_takes_no_gradient_and_no_rows() -> None:
    collection = mixed()
    collection.parameter("user").requires_grad_(False)
    out = collection(batch())
    loss_of(out).backward()
    assert collection.parameter("user").grad is None and collection.count("user") == 0
    assert not out["user"].requires_grad or collection.parameter("item").grad is not None
    assert torch.equal(out["user"], collection.lookup("user", batch()["user"]))
    assert collection.count("word") > 0
    collection.requires_grad_(False)
    assert not any(v.requires_grad for v in collection(batch()).values())


def test_unused_features_get_no_gradient() -> None:
    collection = mixed()
    out = collection(batch())
    out["browsed"].sum().backward()
    assert grads_of(collection).keys() == {"item"}
    want = torch.zeros(20)
    for id in batch()["browsed"].flatten():
        want[id] += 1 / 3
    torch.testing.assert_close(dense_grad(collection.parameter("item"))[:, 0], want)


def test_backward_twice_and_accumulation() -> None:
    once, twice, split = mixed(), mixed(), mixed()
    loss_of(once(batch())).backward()
    loss = loss_of(twice(batch()))
    loss.backward(retain_graph=True)
    first = grads_of(twice)
    assert_equal_grads(first, grads_of(once))
    loss.backward()
    assert_equal_grads(grads_of(twice), {k: 2 * g for k, g in first.items()})
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    for seed in (1, 2):
        loss_of(split(batch(seed=seed))).backward()
    together = mixed()
    (loss_of(together(batch(seed=1))) + loss_of(together(batch(seed=2)))).backward()
    assert_equal_grads(grads_of(split), grads_of(together), exact=False)


def test_no_second_derivative() -> None:
    collection = mixed()
    loss = loss_of(collection(batch()))
    (grad,) = torch.autograd.grad(loss, [collection.parameter("item")], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        grad._values().pow(2).sum().backward()


def test_inputs_may_be_changed_after_the_forward() -> None:
    collection, inputs = mixed(), batch()
    want = mixed()
    loss_of(want(batch())).backward()
    loss = loss_of(collection(inputs))
    for value in inputs.values():
        (value.values if isinstance(value, hb.Jagged) else value).fill_(7)
    inputs["watched"].offsets.fill_(10**9)
    loss.backward()
    assert_equal_grads(grads_of(collection), grads_of(want))


def test_a_weight_gradient_reads_nothing_that_may_have_changed() -> None:
    layer = hb.EmbeddingBag(10, 4, mode="sum", include_last_offset=True)
    w = torch.ones(3, requires_grad=True)
    input, offsets = ids([1, 2, 3]), ids([0, 2, 3])
    out = layer(input, offsets, w)
    input.fill_(10**12)
    offsets.fill_(10**12)
    out.sum().backward()
    torch.testing.assert_close(w.grad, layer.weight.detach()[1:4].sum(1))
    weights = torch.ones(3)
    out = layer(ids([1, 2, 3]), ids([0, 2, 3]), weights)
    weights.fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_outputs_may_be_changed_in_place() -> None:
    collection, plain = mixed(), mixed()
    a, b = collection(batch()), plain(batch())
    a["user"].mul_(2).add_(1)
    a["browsed"][0] = 0
    nn.functional.relu_(a["tag"])
    want = {**b, "user": b["user"] * 2 + 1, "tag": b["tag"].relu()}
    want["browsed"] = torch.cat([torch.zeros(1, 5), b["browsed"][1:]])
    assert all(torch.equal(a[k], want[k]) for k in a)
    loss_of(a).backward()
    loss_of(want).backward()
    assert_equal_grads(grads_of(collection), grads_of(plain), exact=False)


def test_gradients_of_any_layout() -> None:
    for change in (
        lambda g: g.expand(6, 3),
        lambda g: torch.randn(3, 6).T,
        lambda g: torch.randn(6, 6)[:, ::2],
        lambda g: torch.randn(1, 3).expand(6, 3),
        lambda g: torch.randn(7, 3)[1:],
    ):
        collection = hb.EmbeddingCollection([hb.Table("user", 3, 10)], seed=0)
        gradient = change(torch.randn(6, 1))
        index = ids([1, 2, 2, 3, 9, 1])
        collection({"user": index})["user"].backward(gradient)
        want = torch.zeros(10, 3).index_add_(0, index, gradient)
        torch.testing.assert_close(dense_grad(collection.parameter("user")), want)


def test_an_empty_batch_has_an_empty_gradient() -> None:
    collection = mixed()
    out = collection(batch(0))
    assert [tuple(v.shape) for v in out.values()] == [(0, 5), (0, 5), (0, 3), (0, 2, 16), (0, 4)]
    loss_of(out).backward()
    assert all(g.shape[0] == 0 for g in grads_of(collection).values())
    assert grads_of(collection).keys() == {"item", "user", "word", "tag"}


def test_rows_that_move_between_forward_and_backward() -> None:
    layer = hb.EmbeddingBag(None, 8, mode="sum")
    w = torch.rand(2, 3, requires_grad=True)
    index = torch.arange(6).view(2, 3)
    out = layer(index, per_sample_weights=w)
    layer(torch.arange(10, 400_010).view(1, -1))  # the planes grow, and so move
    out.sum().backward()
    torch.testing.assert_close(w.grad, layer._live.lookup(index.flatten()).sum(1).view(2, 3))


def test_each_table_shows_its_own_part_of_the_sums() -> None:
    model = hb.EmbeddingCollection([hb.Table(name, 2, 9) for name in "abc"], seed=0)
    vectors = model(
        {"a": torch.tensor([3, 1]), "b": torch.tensor([4, 2]), "c": torch.tensor([7, 5])}
    )
    sum(n * v.sum() for n, v in enumerate(vectors.values(), 1)).backward()
    for n, (name, ids) in enumerate({"a": [1, 3], "b": [2, 4], "c": [5, 7]}.items(), 1):
        grad = model.parameter(name).grad.coalesce()
        assert grad.indices().tolist() == [ids] and grad.values().tolist() == [[n, n]] * len(ids)


@pytest.mark.parametrize("rows", [20, None])
@pytest.mark.parametrize("padding", [None, 3])
def test_weights_of_features_that_share_a_table(rows, padding):
    table = hb.Table("item", 4, rows, combiner="sum", padding_idx=padding)
    model = hb.EmbeddingCollection([table], {"one": "item", "other": "item"}, seed=1)
    given = {
        "one": torch.tensor([[1, 2], [3, 4], [5, 1]]),
        "other": torch.tensor([[7, 3, 1], [3, 3, 8], [9, 2, 0]]),
    }
    weights = {n: torch.rand(i.shape).flatten().requires_grad_() for n, i in given.items()}
    every = model.lookup("item", torch.arange(20))  # of a dynamic table the first values, too
    found = model(
        {
            name: hb.Jagged(i.flatten(), lengths=[i.shape[1]] * len(i), weights=weights[name])
            for name, i in given.items()
        }
    )
    grads = {name: torch.randn(out.shape) for name, out in found.items()}
    torch.autograd.backward([*found.values()], [*grads.values()])
    for name, some in given.items():
        expected = (every[some] * grads[name][:, None]).sum(-1)
        if padding is not None:
            expected[some == padding] = 0
        torch.testing.assert_close(weights[name].grad, expected.flatten())


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("rows", [60_000, None])
def test_batches_that_are_pooled_in_pieces(rows, ragged):
    """The core shares a table's bags among threads, 256 KiB of rows at a time."""
    draw = torch.Generator().manual_seed(0)
    table = hb.Table("item", 16, rows, combiner="sum")
    model = hb.EmbeddingCollection([table], {"one": "item", "other": "item"}, seed=1)
    model.train()
    numbers = {name: torch.randperm(60_000, generator=draw)[:30_000] for name in ("one", "other")}
    lengths = torch.full((3000,), 10)
    if ragged:
        lengths[::2] -= torch.arange(1500) % 11
        lengths[1::2] += torch.arange(1500) % 11
    found = model({name: hb.Jagged(ids, lengths=lengths) for name, ids in numbers.items()})
    bag_of = torch.repeat_interleave(torch.arange(3000), lengths)
    for name, ids in numbers.items():
        expected = torch.zeros(3000, 16).index_add_(0, bag_of, model.lookup("item", ids))
        torch.testing.assert_close(found[name], expected)
