"""Gradients of a model with tiers: kept graphs, checkpoints, accumulation, gradients taken by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from resolve.tiered_models import (
    NARROW,
    Model,
    adagrad,
    assert_same_rows,
    batches,
    both,
    expected,
    pinned,
    prepared,
    step,
    storage,
    train,
    twins,
)
from torch.utils.checkpoint import checkpoint

import hotbed as hb

ids = torch.tensor


def test_losses_that_are_kept_keep_no_rows() -> None:
    data = batches(30, size=60)
    model = Model(storage(NARROW))
    optimizer = adagrad(model)
    kept = []
    for batch in hb.lookahead(data, model, depth=1):
        kept.append(model(batch))
        kept[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [float(loss.detach()) for loss in kept] == expected(data)
    assert pinned(model) == 0


def test_a_graph_that_is_kept_keeps_its_rows() -> None:
    models = [Model(), Model(storage(NARROW))]
    # Not the dense parameter, which the graph wants to find unchanged.
    optimizers = [hb.optim.Adam(m.embeddings.parameters(), lr=0.01) for m in models]
    first, *rest = batches(6, size=60)
    losses = [model(first) for model in models]
    for loss in losses:
        loss.backward(retain_graph=True)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for batch in rest:
        both(models, optimizers, batch)
    for loss, optimizer in zip(losses, optimizers, strict=True):
        loss.backward()  # once more: the rows must be where they were
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same_rows(models[1], models[0])
    assert pinned(models[1]) == 0


def test_no_second_derivative() -> None:
    model = Model(storage())
    (grad,) = torch.autograd.grad(
        model(batches(1)[0]), [model.embeddings.parameter("user")], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.coalesce().values().sum().backward()
    del grad
    gc.collect()
    model.embeddings.group.tiers.release_spent()
    assert pinned(model) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    data = batches(8, size=60)
    models, optimizers = twins()
    start = torch.zeros((), requires_grad=True)
    for batch in hb.lookahead(data, models[1]):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = checkpoint(
                lambda zero, model=model, batch=batch: model(batch) + zero,
                start,
                use_reentrant=reentrant,
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1]
    assert_same_rows(models[1], models[0])
    assert pinned(models[1]) == 0


def test_saved_tensors_elsewhere() -> None:
    models, optimizers = twins()
    with torch.autograd.graph.save_on_cpu():
        for batch in batches(4, size=60):
            both(models, optimizers, batch)
    assert_same_rows(models[1], models[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled() -> None:
    data = batches(4, size=60)
    models, optimizers = twins()
    compiled = torch.compile(models[1], backend="eager")
    for batch in hb.lookahead(data, models[1]):
        losses = [step(models[0], optimizers[0], batch), step(compiled, optimizers[1], batch)]
        assert losses[0] == losses[1]
    assert prepared(models[1].embeddings.stats()) == 4
    assert_same_rows(models[1], models[0])


def test_gradients_taken_by_hand_keep_their_rows() -> None:
    models, optimizers = twins(70_000)
    data = batches(6, size=60)
    for batch, passing in zip(data[:3], data[3:], strict=True):
        for model, optimizer in zip(models, optimizers, strict=True):
            parameters = list(model.parameters())
            grads = torch.autograd.grad(model(batch), parameters)
            model(passing)  # in the meantime others use the budget
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            del grads, grad
            optimizer.step()
            optimizer.zero_grad()
            parameter.grad = None
    assert_same_rows(models[1], models[0])
    assert pinned(models[1]) == 0


@pytest.mark.parametrize(("dim", "backwards"), [(1, 6), (3, 6), (3, 2), (3, 1)])
@pytest.mark.parametrize("size", [1, 12])
def test_accumulating_adds_in_the_order_of_the_batches(dim: int, size: int, backwards: int) -> None:
    """Whatever slots rows have, however small the table is, and whether batches share a graph."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(10):
        collections = [
            hb.EmbeddingCollection(
                [hb.Table("a", dim, 20), hb.Table("b", dim)], seed=seed, storage=tiers
            )
            for tiers in (None, storage())
        ]
        optimizers = [hb.optim.SGD(c.parameters(), lr=0.1) for c in collections]
        for _ in range(3):
            for _ in range(backwards):
                data = [
                    {name: torch.randint(0, 20, (size,), generator=generator) for name in "ab"}
                    for _ in range(6 // backwards)
                ]
                for collection in collections:
                    sum(
                        v.sin().sum() for batch in data for v in collection(batch).values()
                    ).backward()
            norms = [hb.nn.clip_grad_norm_(list(c.parameters()), 3.0) for c in collections]
            assert torch.equal(*norms)
            for collection, optimizer in zip(collections, optimizers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                for name in "ab":
                    rows, expected = collection.rows(name), collections[0].rows(name)
                    assert torch.equal(rows.ids, expected.ids)
                    assert torch.equal(rows.values, expected.values)


def test_accumulating_more_than_the_budget_says_how_large_it_must_be() -> None:
    data = batches(8, size=100)
    model = Model(storage(NARROW))
    adagrad(model)
    with pytest.raises(hb.StorageError, match="gradients that wait for a step"):
        for batch in data:
            model(batch).backward()
    model.zero_grad()
    model(data[0]).backward()


def test_an_error_names_the_id() -> None:
    model = Model(storage())
    optimizer = adagrad(model)
    train(model, optimizer, batches(4))
    for name in ("item", "user"):
        vectors = model.embeddings({"item": ids([7, 250]), "user": ids([9, 10**11])})
        (vectors[name] * ids([[1.0], [float("nan")]])).sum().backward()
        with pytest.raises(hb.NotFiniteError, match=f"id {250 if name == 'item' else 10**11}, "):
            optimizer.step()
        optimizer.zero_grad()
