"""What must raise, and must leave everything as it was."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim.models import ALL, Model, Twin, assert_same, backward, batches, tables_of, train
from torch import nn

import hotbed as hb
from hotbed import _core


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ALL)
def test_a_gradient_that_is_not_finite_refuses_the_whole_step(name: str, bad: float) -> None:
    model = Model(dynamic=True)
    optimizer = getattr(hb.optim, name)(model.parameters())
    train(model, optimizer, list(batches(2)))
    backward(model, 7)
    grad = model.embeddings.parameter("user").grad
    grad._values()[2, 4] = bad
    victim = int(model.embeddings.table("user").ids()[grad._indices()[0, 2]])
    rows, top = tables_of(model), model.top.weight.clone()
    states = optimizer.state_dict()["state"]
    with pytest.raises(hb.NotFiniteError, match=f"Table 'user', id {victim}, column 4"):
        optimizer.step()
    grad._values()[2, 4] = 0.0
    model.top.bias.grad[0] = bad
    with pytest.raises(hb.NotFiniteError, match=r"Parameter 'top.bias' of shape \(1,\).*element 0"):
        optimizer.step()
    for table, before in rows.items():
        assert torch.equal(tables_of(model)[table], before)
    assert torch.equal(model.top.weight, top)
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[index][key]))


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="this torch takes no names of parameters")
def test_names_of_named_parameters_are_used() -> None:
    model = Model()
    optimizer = hb.optim.SGD(list(model.named_parameters()), lr=0.1)
    backward(model)
    model.top.weight.grad[0, 0] = float("nan")
    with pytest.raises(hb.NotFiniteError, match="Parameter 'top.weight' has a NaN"):
        optimizer.step()


def test_grad_scaler_skips_a_bad_step_and_unscales_a_good_one() -> None:
    model = Model(dtype=torch.float32)
    twin = Twin(model)
    ours = hb.optim.Adagrad(model.parameters(), lr=0.1)
    theirs = torch.optim.Adagrad(twin.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step, (batch, label) in enumerate(batches(8)):
        for m, o, s in zip((model, twin), (ours, theirs), scalers, strict=True):
            factor = float("inf") if step == 3 else 1.0
            loss = (m(batch) - label.float()).square().mean() * factor
            before = [p.clone() for p in m.top.parameters()]
            s.scale(loss).backward()
            s.step(o)
            s.update()
            o.zero_grad()
            same = all(torch.equal(a, b) for a, b in zip(before, m.top.parameters(), strict=True))
            assert same == (step == 3)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert_same(model, twin, 1e-5)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "SparseAdam", "Adagrad", "RMSprop"])
def test_a_torch_optimizer_holding_a_table_raises_at_its_first_step(name: str) -> None:
    model = Model()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    backward(model)
    before = tables_of(model)
    dense = name.removeprefix("Sparse")
    told = f"'item'.*torch.optim.{name}.*hotbed.optim.{name}.* to torch.optim.{dense}\\."
    with pytest.raises(hb.OptimizerError, match=told):
        optimizer.step()
    with pytest.raises(hb.OptimizerError):
        optimizer.step()
    assert torch.equal(tables_of(model)["item"], before["item"])


def test_a_table_left_out_raises_at_the_next_training_forward() -> None:
    model = Model()
    optimizer = torch.optim.SGD(hb.split_parameters(model)[1], lr=0.1)
    backward(model)  # without any optimizer: allowed
    backward(model)
    optimizer.step()
    batch, _ = next(batches(1))
    with torch.no_grad():
        model(batch)
    with pytest.raises(hb.OptimizerError, match="Table 'item' had a gradient when SGD took a step"):
        model(batch)


def test_a_table_left_out_of_hotbed_optimizers_too() -> None:
    model = Model()
    user = model.embeddings.parameter("user")
    optimizer = hb.optim.SGD([p for p in model.parameters() if p is not user], lr=0.1)
    backward(model)
    optimizer.step()
    batch, _ = next(batches(1))
    with pytest.raises(hb.OptimizerError, match="Table 'user' had a gradient"):
        model(batch)
    optimizer.add_param_group({"params": [user]})
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    model(batch)


def test_a_frozen_table_may_be_left_out() -> None:
    model = Model()
    user = model.embeddings.parameter("user")
    user.requires_grad_(False)
    before = tables_of(model)["user"]
    optimizer = hb.optim.Adam([p for p in model.parameters() if p is not user], lr=0.1)
    train(model, optimizer, list(batches(3)))
    assert torch.equal(tables_of(model)["user"], before)
    assert user.grad is None


def test_another_rule_must_be_asked_for() -> None:
    model = Model()
    first = hb.optim.Adam(model.parameters(), lr=0.01)
    train(model, first, list(batches(2)))
    rows = tables_of(model)
    with pytest.raises(hb.OptimizerError, match="Table 'item' has the states of hotbed.optim.Adam"):
        hb.optim.Adagrad(model.parameters())
    with pytest.raises(hb.OptimizerError, match="replace_state=True"):
        hb.optim.Adam(model.parameters(), amsgrad=True)
    second = hb.optim.Adagrad(
        model.parameters(), lr=0.1, initial_accumulator_value=0.25, replace_state=True
    )
    assert torch.equal(tables_of(model)["item"], rows["item"])
    entry = second.state_dict()["state"][0]
    assert entry["step"] == 0
    assert bool((entry["sum"] == 0.25).all())
    train(model, second, list(batches(2)))
    backward(model)
    with pytest.raises(hb.OptimizerError, match="taken over by another optimizer .Adagrad"):
        first.step()
    with pytest.raises(hb.OptimizerError, match="taken over"):
        first.state_dict()


def test_the_same_rule_goes_on_with_the_states() -> None:
    one, two = Model(), Model()
    data = list(batches(8))
    single = hb.optim.Adam(one.parameters(), lr=0.01)
    losses = train(one, single, data)
    dense = hb.split_parameters(two)[1]
    kept = torch.optim.Adam(dense, lr=0.01)
    optimizer: Any = hb.optim.Adam(hb.split_parameters(two)[0], lr=0.01)
    again = []
    for step, (batch, label) in enumerate(data):
        if step == 4:
            del optimizer
            gc.collect()
            optimizer = hb.optim.Adam(hb.split_parameters(two)[0], lr=0.01)
        loss = (two(batch) - label).square().mean()
        loss.backward()
        again.append(float(loss.detach()))
        for o in (optimizer, kept):
            o.step()
            o.zero_grad()
    assert again == losses


@pytest.mark.parametrize("name", ALL)
def test_existing_rows_get_first_states(name: str) -> None:
    early, late = Model(dynamic=True), Model(dynamic=True)
    ids = torch.arange(12)
    for model in (early, late):
        if model is late:
            model.embeddings.assign("user", ids, model.embeddings.lookup("user", ids))
    optimizers = [getattr(hb.optim, name)(m.parameters()) for m in (early, late)]
    data = list(batches(5))
    assert train(early, optimizers[0], data) == train(late, optimizers[1], data)


def test_a_gradient_of_a_cleared_table_is_refused() -> None:
    model = Model(dynamic=True)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    model.embeddings.table("user").core.clear()
    with pytest.raises(hb.OptimizerError, match="zero_grad"):
        optimizer.step()


def test_out_of_memory_for_states_names_the_table(pretend_memory: Callable[[int], None]) -> None:
    layer = hb.Embedding(300_000, 64)
    pretend_memory(1 << 20)
    with pytest.raises(hb.OutOfMemory, match="Table 'embedding', exp_avg"):
        hb.optim.Adam(layer.parameters())
    pretend_memory(0)
    optimizer = hb.optim.Adam(layer.parameters())
    layer(torch.tensor([3])).sum().backward()
    optimizer.step()


def test_a_table_whose_states_found_no_memory_is_usable(
    pretend_memory: Callable[[int], None],
) -> None:
    """It followed a dense optimizer, and has none now."""
    layer = hb.Embedding(300_000, 64)
    hb.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1, untouched="exact")
    pretend_memory(1 << 20)
    with pytest.raises(hb.OutOfMemory):
        hb.optim.Adam(layer.parameters(), replace_state=True)
    pretend_memory(0)
    assert torch.isfinite(layer.weight.sum())
    layer(torch.tensor([3])).sum().backward()
    hb.optim.Adam(layer.parameters(), replace_state=True).step()


def test_copies() -> None:
    model = Model()
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, list(batches(3)))
    copied = copy.deepcopy(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for thing in (optimizer, schedule, {"optimizer": optimizer}):
        for way in (copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(hb.OptimizerError, match="Adam: .* cannot be copied or pickled"):
                way(thing)
    with pytest.raises(hb.OptimizerError, match="cannot be copied or pickled"):
        copy.copy(optimizer)
    fresh = hb.optim.Adam(copied.parameters(), lr=0.01)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares dense states
    data = list(batches(3, seed=4))
    assert train(copied, fresh, data) == train(model, optimizer, data)


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_and_its_optimizer_go_without_the_garbage_collector(fused: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        model = Model(dynamic=True)
        optimizer = hb.optim.Adam(model.parameters(), fused=fused)
        train(model, optimizer, list(batches(2)))
        table = weakref.ref(model.embeddings.table("user"))
        del model, optimizer
        assert table() is None
    finally:
        gc.enable()


def test_zero_grad_to_zero_keeps_stepping() -> None:
    model = Model()
    twin = Twin(model)
    ours = hb.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, untouched="exact")
    theirs = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for m, o in ((model, ours), (twin, theirs)):
        for seed in range(4):
            backward(m, seed)
            o.step()
            o.zero_grad(set_to_none=False)
            o.step()
    assert_same(model, twin, 1e-11)


def test_the_history_is_kept_only_as_long_as_some_row_needs_it() -> None:
    layer = hb.Embedding(6, 2, dtype=torch.float64)
    twin = nn.Embedding(6, 2, _weight=layer.weight.detach().clone())
    ours = hb.optim.AdamW(layer.parameters(), lr=0.01, untouched="exact")
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01, foreach=False)
    rule = layer._live.rule
    longest = 0
    for step in range(8300):
        ids = [0] + [1] * (step % 1000 == 0) + [2] * (step == 5)
        grad = torch.sparse_coo_tensor(
            [ids], torch.ones(len(ids), 2, dtype=torch.float64), (6, 2), check_invariants=False
        )
        layer.weight.grad, twin.weight.grad = grad, grad.to_dense()
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
            optimizer.step()
        longest = max(longest, rule.history_runs)
    assert longest == 8191
    assert rule.history_runs < 200
    got = layer._live.lookup(torch.arange(6))
    torch.testing.assert_close(got, twin.weight.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("spoil", ["values", "grad"])
def test_a_gradient_spoiled_after_backward_is_refused(spoil: str) -> None:
    """Backward has found it finite; what changes it later must not go unseen."""
    model = Model()
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    handle = next(p for p in model.parameters() if p.grad is not None and p.grad.is_sparse)
    before = [p.detach().clone() for p in model.parameters()]
    if spoil == "values":
        handle.grad._values()[0, 0] = float("nan")
    else:
        handle.grad.mul_(float("inf"))
    with pytest.raises(hb.NotFiniteError):
        optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old, rtol=0, atol=0, equal_nan=True)


def test_a_table_that_was_taken_over_is_no_error_until_it_is_to_be_stepped() -> None:
    model = hb.EmbeddingCollection([hb.Table("a", 4, 9), hb.Table("b", 4, 9)], seed=0)
    first = hb.optim.SGD(model.parameters(), lr=0.1)
    hb.optim.Adagrad([model.parameter("b")], lr=0.1, replace_state=True)
    ids = torch.arange(3)
    model({"a": ids, "b": ids})["a"].sum().backward()
    before = model.rows("a").values
    first.step()
    assert not torch.equal(model.rows("a").values, before)
    model({"a": ids, "b": ids})["b"].sum().backward()
    with pytest.raises(hb.OptimizerError, match="Table 'b' was taken over"):
        first.step()


def test_steps_of_a_table_whose_rows_lie_elsewhere_are_remembered_within_bounds() -> None:
    """As where ranks share it: it has no rows of its own that could be behind."""
    zeros = hb.Table("a", 4, init=hb.init.Zeros()).bands()
    table = _core.Table.make("a", 50, 4, _core.DType.f32, zeros, 0, None, released=True)
    options = _core.RuleOptions()
    options.rule = _core.Rule.adam
    rule = _core.TableRule.make(table, options, 0.0, True)
    nothing = torch.empty(0, dtype=torch.int64), torch.empty((0, 4))
    hyper = _core.Hyperparameters()
    for step in range(9000):
        hyper.lr = 1.0 / (step + 1)  # another in each step, so that no two are remembered as one
        entry = rule, nothing[0].data_ptr(), nothing[1].data_ptr(), 0, hyper, True, True
        taken = _core.Step([entry], [])
        taken.decide()
        taken.apply()
    assert rule.steps == 9000 and rule.history_runs < 8192
