"""What must raise, and must leave everything as it was."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Model, Twin, assert_same, batches, loss_of, tables_of, train
from torch import nn

import hotbed as hb

ALL = ["SGD", "Adagrad", "RowwiseAdagrad", "Adam", "AdamW", "RowwiseAdam"]
ALL += ["Adamax", "Adadelta", "RMSprop", "FTRL"]


def backward(model: nn.Module, seed: int = 0) -> torch.Tensor:
    loss = loss_of(model, seed)
    loss.backward()
    return loss.detach()


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


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_counts_tables_and_dense_alike(norm_type: float, max_norm: float) -> None:
    model = Model()
    twin = Twin(model)
    for m in (model, twin):
        backward(m, 0)
        backward(m, 1)  # accumulated: rows repeat in the handle's gradient
    norm = hb.nn.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-12)
    for name in ("item", "user"):
        grad = model.embeddings.parameter(name).grad.to_dense()
        torch.testing.assert_close(grad, getattr(twin, name).weight.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(model.top.weight.grad, twin.top.weight.grad, rtol=1e-12, atol=0)


def test_clipping_odd_cases() -> None:
    assert float(hb.nn.clip_grad_norm_([], 1.0)) == 0.0
    model = Model()
    assert float(hb.nn.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
    backward(model)
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 1, 2])).sum().backward()
    assert float(hb.nn.clip_grad_norm_(layer.weight, 1.0)) == pytest.approx(10**0.5, rel=1e-6)
    model.top.weight.grad[0, 0] = float("nan")
    before = model.embeddings.parameter("item").grad._values().clone()
    with pytest.raises(RuntimeError, match="norm of nan"):
        hb.nn.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert torch.equal(model.embeddings.parameter("item").grad._values(), before)


def test_clipping_by_torch_raises() -> None:
    model = Model(dynamic=True)
    backward(model)
    for parameters in (model.parameters(), [model.embeddings.parameter("user")]):
        with pytest.raises(NotImplementedError):
            nn.utils.clip_grad_norm_(parameters, 1.0)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "SparseAdam", "Adagrad", "RMSprop"])
def test_a_torch_optimizer_holding_a_table_raises_at_its_first_step(name: str) -> None:
    model = Model()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    backward(model)
    before = tables_of(model)
    use = "Adam" if name == "SparseAdam" else name
    with pytest.raises(hb.OptimizerError, match=f"'item'.*torch.optim.{name}.*hotbed.optim.{use}"):
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
    with pytest.raises(hb.OptimizerError, match="Table 'item' has the states of a Adam"):
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


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Adam", {"weight_decay": 0.1}, "decoupled_weight_decay=True"),
        ("Adagrad", {"weight_decay": 0.1}, "decoupled_weight_decay=True"),
        ("RMSprop", {"weight_decay": 0.1}, "decoupled_weight_decay=True"),
        ("FTRL", {"l2_shrinkage": 0.1}, "l2_shrinkage"),
        ("Adam", {"betas": (0.99, 0.9)}, "do not fade"),
        ("Adamax", {"betas": (0.99, 0.9)}, "do not fade"),
    ],
)
def test_exact_is_refused_where_it_has_no_bound(
    name: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(hb.OptimizerError, match=reason):
        getattr(hb.optim, name)(Model().parameters(), untouched="exact", **options)
    getattr(hb.optim, name)(Model().parameters(), **options)


def test_exact_refuses_decay_that_comes_later() -> None:
    model = Model()
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1, untouched="exact")
    backward(model)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(hb.OptimizerError, match="weight_decay was 0 when"):
        optimizer.step()


def test_exact_adamax_keeps_its_eps() -> None:
    model = Model()
    optimizer = hb.optim.Adamax(model.parameters(), untouched="exact")
    backward(model)
    optimizer.step()
    optimizer.param_groups[0]["eps"] = 1e-3
    with pytest.raises(hb.OptimizerError, match="eps changed from 1e-08 to 0.001"):
        optimizer.step()


def test_structure_must_not_change_after_construction() -> None:
    model = Model()
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1)
    backward(model)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(hb.OptimizerError, match="amsgrad of group 0 changed"):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("SGD", {"lr": -1.0}, ValueError),
        ("SGD", {"nesterov": True}, ValueError),
        ("SGD", {"weight_decay": -0.1}, ValueError),
        ("Adam", {"betas": (1.0, 0.9)}, ValueError),
        ("Adagrad", {"eps": -1.0}, ValueError),
        ("Adadelta", {"rho": 1.5}, ValueError),
        ("RMSprop", {"alpha": -0.5}, ValueError),
        ("FTRL", {"lr_power": 0.5}, ValueError),
        ("FTRL", {"lr": 0.0}, hb.OptimizerError),
        ("Adam", {"untouched": "eager"}, hb.OptimizerError),
        ("Adam", {"capturable": True}, hb.OptimizerError),
        ("SGD", {"differentiable": True}, hb.OptimizerError),
    ],
)
def test_bad_arguments(name: str, options: dict[str, Any], error: type[Exception]) -> None:
    model = Model()
    with pytest.raises(error):
        getattr(hb.optim, name)(model.parameters(), **options)
    assert model.embeddings.table("item").rule is None


def test_a_table_is_given_once() -> None:
    layer = hb.Embedding(5, 2)
    again = hb.EmbeddingCollection.from_layers([layer], names=["item"])
    with pytest.raises(hb.OptimizerError, match="Table 'item' is given to the optimizer twice"):
        hb.optim.Adam([*layer.parameters(), *again.parameters()])
    with pytest.raises(hb.OptimizerError, match="given to the optimizer twice"):
        hb.optim.Adam([*layer.named_parameters(), *again.named_parameters()])
    with pytest.raises(ValueError, match="more than one parameter group"):
        hb.optim.Adam([{"params": layer.weight}, {"params": again.parameters()}])
    hb.optim.Adam(nn.ModuleList([layer, again]).parameters())


@pytest.mark.parametrize("lr", [float("nan"), float("inf")])
def test_a_rate_that_is_not_finite_reaches_no_row(lr: float) -> None:
    model = Model()
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    before = tables_of(model)
    backward(model)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(hb.OptimizerError, match=f"SGD: lr is {lr}"):
        optimizer.step()
    assert all(torch.equal(rows, before[name]) for name, rows in tables_of(model).items())


@pytest.mark.parametrize("name", [name for name in ALL if name != "FTRL"])
def test_l1_is_ftrls(name: str) -> None:
    kind = getattr(hb.optim, name)
    says = f"{name} has no option l1: .*FTRL.*penalty"
    with pytest.raises(hb.OptimizerError, match=says):
        kind(Model().parameters(), l1=0.1)
    with pytest.raises(hb.OptimizerError, match=says):
        kind([{"params": Model().parameters(), "l1": 0.1}])
    with pytest.raises(hb.OptimizerError, match="weight_decay"):
        kind(Model().parameters(), l2=0.1)
    with pytest.raises(TypeError, match="bogus"):
        kind(Model().parameters(), bogus=0.1)
    hb.optim.FTRL([{"params": Model().parameters(), "l1": 0.1, "l2": 0.1}])


def test_every_optimizer_names_its_options() -> None:
    """Signatures are torch's, plus what tables need: none hides an option, and none is lost."""
    for name in ALL:
        kind = getattr(hb.optim, name)
        group = kind(Model().parameters()).param_groups[0]
        options = set(inspect.signature(kind.__init__).parameters) - {"self", "params", "options"}
        structural = {
            "untouched",
            "dense",
            "fused",
            "replace_state",
            "capturable",
            "differentiable",
        }
        assert options - structural <= set(group) and not structural & set(group)
        if hasattr(torch.optim, name):
            theirs = set(inspect.signature(getattr(torch.optim, name)).parameters)
            missing = theirs - options - {"params", "fused", "foreach"}
            assert name == "AdamW" or missing <= {"decoupled_weight_decay"}, missing


@pytest.mark.parametrize("tables", [1, 3])
def test_fused_refuses_a_gradient_that_is_not_finite(tables: int) -> None:
    names = [f"t{t}" for t in range(tables)]
    embeddings = hb.EmbeddingCollection([hb.Table(n, dim=4, rows=9) for n in names], seed=0)
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1, fused=True)
    batch = {name: torch.tensor([3, 7, 3]) for name in names}
    sum(v.sum() for v in embeddings(batch).values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    before = {name: embeddings.rows(name).values.clone() for name in names}
    vectors = embeddings(batch)
    weights = {name: torch.ones(3, 4) for name in names}
    weights["t0"][1, 2] = float("nan")
    with pytest.raises(hb.NotFiniteError, match="'t0', id 7, column 2.*the table was not changed"):
        sum((vectors[n] * weights[n]).sum() for n in names).backward()  # type: ignore[union-attr]
    assert torch.equal(embeddings.rows("t0").values, before["t0"])
    sum(v.sum() for v in embeddings(batch).values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    moved = embeddings.rows("t0").values - before["t0"]
    assert torch.allclose(moved[[3, 7]], torch.tensor([[-0.2], [-0.1]]).expand(2, 4))
    assert not moved[[0, 1, 2, 4, 5, 6, 8]].any()


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowwiseAdagrad", "Adam", "FTRL"])
@pytest.mark.parametrize("tables", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fused_gives_the_same_bits(name: str, tables: int, dtype: torch.dtype) -> None:
    """Enough ids that both ways of summing run in parallel; weighted bags, and rows left alone."""
    generator = torch.Generator().manual_seed(0)
    names = [f"t{t}" for t in range(tables)]
    results = []
    ids = {n: torch.randint(0, 3000, (4, 900, 3), generator=generator) for n in names}
    scale = torch.randn(900, 16, generator=generator).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    for fused in (False, True):
        embeddings = hb.EmbeddingCollection(
            [hb.Table(n, dim=16, rows=None, combiner="mean", dtype=dtype) for n in names], seed=0
        )
        optimizer = getattr(hb.optim, name)(embeddings.parameters(), lr=0.1, fused=fused)
        for step in range(4):
            vectors = embeddings({n: ids[n][step] for n in names})
            sum((v * scale).sum() for v in vectors.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([embeddings.rows(n) for n in names])
    for plain, at_once in zip(*results, strict=True):
        assert torch.equal(plain.ids, at_once.ids)
        assert torch.equal(plain.values, at_once.values)


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


def test_copies() -> None:
    model = Model()
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, list(batches(3)))
    copied = copy.deepcopy(model)
    with pytest.raises(hb.OptimizerError, match="cannot be copied"):
        copy.deepcopy(optimizer)
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
