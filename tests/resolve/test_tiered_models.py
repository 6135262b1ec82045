"""A model with tiers in torch's hands: saved, loaded, assigned, evaluated, given other optimizers, whether
look-ahead is under way or not."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from resolve.tiered_models import (
    NARROW,
    Model,
    adagrad,
    assert_same_rows,
    batches,
    both,
    everything,
    pinned,
    step,
    storage,
    train,
    twins,
)

import hotbed as hb

ids = torch.tensor


# -- while a window is open --------------------------------------------------------------------------


def reload(model: Model, other: Model) -> None:
    model.load_state_dict(other.state_dict())


def assign(model: Model, other: Model) -> None:
    values = torch.arange(40.0).view(10, 4)
    model.embeddings.assign("item", torch.arange(10) * 3, values)
    model.embeddings.assign("user", torch.arange(10) * 60, values)  # some of them new


def look(model: Model, other: Model) -> None:
    model.embeddings.rows("item")
    model.embeddings.lookup("user", torch.arange(600))
    model.embeddings.memory()
    model.state_dict()
    model.embeddings.flush()


def evaluate(model: Model, other: Model) -> None:
    model.eval()
    with torch.no_grad():
        model(batches(1, size=2000, seed=9)[0])
    model(batches(1, seed=10)[0])
    model.train()


@pytest.mark.parametrize("interrupt", [reload, assign, look, evaluate])
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_what_happens_while_look_ahead_is_under_way(
    interrupt: Callable[[Model, Model], None], untouched: str
) -> None:
    data = batches(12, size=60)
    other = Model()
    train(other, adagrad(other), batches(5, size=60, seed=4))
    models, optimizers = twins(untouched=untouched)
    for at, batch in enumerate(hb.lookahead(data, models[1], depth=3)):
        assert batch is data[at]
        if at in (0, 5, 6):
            for model in models:
                interrupt(model, other)
        both(models, optimizers, batch)
    assert_same_rows(models[1], models[0])
    assert pinned(models[1]) == 0


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_an_optimizer_that_comes_later(untouched: str) -> None:
    """Rows keep their weights, at first and when another rule takes them over."""
    data = batches(15, size=60)
    models = [Model(), Model(storage(NARROW))]
    optimizers = [hb.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for at, batch in enumerate(hb.lookahead(data, models[1])):
        if at in (5, 10):
            rows = everything(models[1])
            make = hb.optim.AdamW if at == 5 else hb.optim.RowwiseAdagrad
            optimizers = [
                make(m.parameters(), lr=0.01, untouched=untouched, replace_state=True)
                for m in models
            ]
            for name, before in rows.items():
                assert torch.equal(models[1].embeddings.rows(name).values, before.values)
        both(models, optimizers, batch)
    assert_same_rows(models[1], models[0])


def test_rows_without_an_optimizer_and_one_for_each_half() -> None:
    models = [Model(), Model(storage(NARROW))]
    data = batches(12, size=60)
    for model in models:
        model.embeddings.assign("user", torch.arange(100), torch.ones(100, 4))
    pairs = []
    for model in models:
        tables, dense = hb.split_parameters(model)
        pairs.append(
            [hb.optim.FTRL([tables[0]], lr=0.1), hb.optim.RMSprop([tables[1], *dense], lr=0.01)]
        )
    for batch in hb.lookahead(data, models[1]):
        losses = []
        for model, pair in zip(models, pairs, strict=True):
            loss = model(batch)
            loss.backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1]
    assert_same_rows(models[1], models[0])


def test_evaluation_leaves_no_trace() -> None:
    data = batches(12, size=60)
    model = Model(storage(NARROW))
    optimizer = adagrad(model)
    train(model, optimizer, hb.lookahead(data, model))
    stats, rows = model.embeddings.stats(), everything(model)
    model.eval()
    for batch in hb.lookahead(batches(5, size=500, seed=7), model):
        model(batch)
        with torch.no_grad():
            model(batch)
    model.train()
    with torch.no_grad():
        model(data[0])
    after = model.embeddings.stats()
    assert after.pop("rows_read_past") > stats.pop("rows_read_past")
    assert after.pop("rows_from_host") > stats.pop("rows_from_host")
    moved = {"memory_bytes", "queue_depth"}
    assert {k: v for k, v in after.items() if k not in moved} == {
        k: v for k, v in stats.items() if k not in moved
    }
    assert pinned(model) == 0
    for name, before in rows.items():
        now = model.embeddings.rows(name)
        assert torch.equal(now.ids, before.ids) and torch.equal(now.values, before.values)


def test_the_hit_rate_is_a_share_from_the_first_batch_on() -> None:
    model = Model(storage())
    for batch in hb.lookahead(batches(4), model, depth=3):
        assert 0 <= model.embeddings.stats()["hit_rate"] <= 1
        model(batch)


# -- between forward and backward --------------------------------------------------------------------


def test_loading_between_forward_and_backward() -> None:
    """Rows of a dynamic table are others then; a static table's stay where they are."""
    other = Model()
    train(other, adagrad(other), batches(3, seed=5))
    data = batches(6)
    models, optimizers = twins()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data[:3])
        loss = model(data[3])
        model.embeddings.load_state_dict(other.embeddings.state_dict())
        with pytest.raises(hb.TableError, match="between this forward and its backward"):
            loss.backward()
        del loss
        model.zero_grad()
        vectors = model.embeddings({"item": ids([1, 2]), "user": ids([1, 2])})
        rows = torch.full((300, 4), 2.0)
        model.embeddings.load_state_dict({"item": rows}, strict=False)
        vectors["item"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_rows(models[1], models[0])
    for batch in data:
        both(models, optimizers, batch)
    del vectors
    assert_same_rows(models[1], models[0])
    assert pinned(models[1]) == 0


def test_forgetting_rows_that_are_in_use() -> None:
    models, optimizers = twins()
    data = batches(6)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data[:3])
        vectors = model.embeddings({name: data[3][name] for name in ("item", "user")})
        model.embeddings.table("user").forget_rows()
        model.embeddings.table("item").draw_again(12345)
        assert model.embeddings.count("user") == 0
        assert len(model.embeddings.rows("user").ids) == 0
        with pytest.raises(hb.TableError, match="'user' was loaded, reset or erased from"):
            vectors["item"].sum().backward()
    del vectors
    for model in models:
        model.zero_grad()
    for batch in data:
        both(models, optimizers, batch)
    assert_same_rows(models[1], models[0])
    assert pinned(models[1]) == 0


def test_an_optimizer_between_forward_and_backward_or_step() -> None:
    model = Model(storage())
    data = batches(3)
    loss = model(data[0])
    optimizer = adagrad(model)
    loss.backward()
    with pytest.raises(hb.OptimizerError, match="zero_grad"):
        optimizer.step()
    with pytest.raises(hb.TableError, match="zero_grad"):
        model(data[0])
    model.zero_grad()
    loss = model(data[0])
    optimizer = hb.optim.Adam(model.parameters(), replace_state=True)
    model(data[1])  # which gives rows other slots
    with pytest.raises(hb.TableError, match="between this forward and its backward"):
        loss.backward()
    model.zero_grad()
    step(model, optimizer, data[2])


# -- copies, saving, memory --------------------------------------------------------------------------


def test_copies_are_refused() -> None:
    model = Model(storage())
    step(model, adagrad(model), batches(1)[0])
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(hb.TableError, match="load the state_dict"):
            copied(model)


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize(("of", "to"), [(0, 1), (1, 0), (1, 1)])
def test_states_move_between_models_with_and_without_tiers(
    of: int, to: int, order: str, untouched: str
) -> None:
    data = batches(16, size=60)

    def make(kind: int) -> tuple[Model, Any]:
        model = Model(storage(NARROW) if kind else None)
        return model, hb.optim.AdamW(
            model.parameters(), lr=0.02, weight_decay=0.1, untouched=untouched
        )

    model, optimizer = make(of)
    train(model, optimizer, hb.lookahead(data[:8], model))
    saved = [copy.deepcopy(x.state_dict()) for x in (model, optimizer)]
    again, its_optimizer = make(to)
    parts = list(zip((again, its_optimizer), saved, strict=True))
    for part, state in parts if order == "model first" else parts[::-1]:
        part.load_state_dict(state)
    losses = train(model, optimizer, hb.lookahead(data[8:], model))
    assert train(again, its_optimizer, hb.lookahead(data[8:], again)) == pytest.approx(
        losses, rel=1e-6 if untouched == "exact" else 0
    )
    for name, rows in everything(model).items():
        found = again.embeddings.rows(name)
        assert torch.equal(found.ids, rows.ids)
        tolerance = 1e-6 if untouched == "exact" else 0
        torch.testing.assert_close(found.values, rows.values, rtol=0, atol=tolerance)


def test_tables_go_with_the_model() -> None:
    model = Model(storage())
    optimizer = adagrad(model)
    train(model, optimizer, hb.lookahead(batches(4), model))
    model(batches(1)[0]).backward()
    table = weakref.ref(model.embeddings.table("user"))
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert table() is None
    finally:
        gc.enable()


def test_memory_of_tables_is_that_of_their_rows() -> None:
    models, optimizers = twins()
    train(models[0], optimizers[0], batches(6))
    train(models[1], optimizers[1], batches(6))
    plain, tiered = (model.embeddings.memory() for model in models)
    for name, parts in tiered.items():
        assert parts["rows"] == plain[name]["rows"]
        assert parts["weights"] == plain[name]["weights"] == parts["rows"] * 16
        assert parts["states"] == 2 * parts["weights"]
    taken = models[1].embeddings.stats()["memory_bytes"]
    assert taken - len(tiered) <= sum(parts["total"] for parts in tiered.values()) <= taken


def test_padding_that_was_assigned_is_what_an_unpooled_lookup_returns() -> None:
    found = []
    for tiers in (None, storage()):
        tables = [
            hb.Table("a", 2, 20, combiner="none", padding_idx=3),
            hb.Table("b", 2, combiner="none", padding_idx=3),
        ]
        features = {"a": "a", "b": "b", "again": "b"}
        collection = hb.EmbeddingCollection(tables, features, seed=0, storage=tiers)
        batch = dict.fromkeys(features, ids([3, 5, 3]))
        found.append([v.detach().clone() for v in collection(batch).values()])
        for name in ("a", "b"):
            collection.assign(name, ids([3]), ids([[1.0, 2.0]]))
        found[-1] += [v.detach().clone() for v in collection(batch).values()]
        found[-1] += [v.detach().clone() for v in collection.eval()(batch).values()]
        assert found[-1][-1][0].tolist() == [1.0, 2.0]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
