"""hotbed.optim against torch.optim, through modules, losses and schedules."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from optim.models import DIM, ROWS, Model, Twin, assert_same, batches, tables_of, train
from optim.rule_oracles import DenseFtrl, DenseRowwiseAdagrad, DenseRowwiseAdam
from torch.optim import lr_scheduler

import hotbed as hb

# name, arguments, arguments of torch's counterpart where they differ
AS_TORCH: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.02}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.99)}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.01}),
    ("Adadelta", {"lr": 1.0}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.8, "centered": True}),
]
IDS = [f"{name}-{'-'.join(options)}" for name, options in AS_TORCH]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("name", "options"), AS_TORCH, ids=IDS)
def test_exact_training_equals_dense_torch(
    name: str, options: dict[str, Any], dynamic: bool
) -> None:
    model = Model(dynamic)
    twin = Twin(model)
    ours = getattr(hb.optim, name)(model.parameters(), untouched="exact", **options)
    theirs = getattr(torch.optim, name)(twin.parameters(), **options)
    schedules = [lr_scheduler.CosineAnnealingLR(o, 40, eta_min=1e-3) for o in (ours, theirs)]
    data = list(batches(40))
    losses = train(model, ours, data, schedules[0])
    expected = train(twin, theirs, data, schedules[1])
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_same(model, twin, 1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [AS_TORCH[0], AS_TORCH[4], ("Adagrad", {"lr": 0.1})],
    ids=["SGD", "Adagrad-options", "Adagrad"],
)
def test_lazy_training_equals_dense_torch_where_untouched_rows_stay(
    name: str, options: dict[str, Any]
) -> None:
    model = Model()
    twin = Twin(model)
    ours = getattr(hb.optim, name)(model.parameters(), **options)
    theirs = getattr(torch.optim, name)(twin.parameters(), **options)
    data = list(batches(30))
    assert train(model, ours, data) == pytest.approx(train(twin, theirs, data), rel=1e-10)
    assert_same(model, twin, 1e-11)


def test_lazy_adam_equals_sparse_adam() -> None:
    model = Model()
    twin = Twin(model, sparse=True)
    ours = hb.optim.Adam(model.parameters(), lr=0.01)
    tables = [twin.item.weight, twin.user.weight]
    sparse = torch.optim.SparseAdam(tables, lr=0.01)
    dense = torch.optim.Adam(twin.top.parameters(), lr=0.01)
    data = list(batches(30))
    losses = train(model, ours, data)
    expected = []
    for batch, label in data:
        loss = (twin(batch) - label).square().mean()
        loss.backward()
        expected.append(float(loss.detach()))
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    # SparseAdam adds eps before the bias correction.
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "oracle"),
    [
        ("RowwiseAdagrad", {"lr": 0.1}, (DenseRowwiseAdagrad, {"eps": 1e-8}, 0.0)),
        (
            "RowwiseAdam",
            {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
            (
                DenseRowwiseAdam,
                {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True},
                0.0,
            ),
        ),
        ("FTRL", {"lr": 0.1, "l1": 0.01, "l2": 0.1}, (DenseFtrl, {"l1": 0.01, "l2": 0.1}, 0.1)),
    ],
)
def test_rules_torch_lacks(name: str, options: dict[str, Any], oracle: Any) -> None:
    model = Model()
    twin = Twin(model)
    kind, hyper, first = oracle
    ours = getattr(hb.optim, name)(model.parameters(), untouched="exact", **options)
    dense = {"RowwiseAdagrad": "Adagrad", "RowwiseAdam": "AdamW"}.get(name)
    tables = kind([twin.item.weight, twin.user.weight], options["lr"], hyper, first)
    if dense is None:
        top: Any = kind(twin.top.parameters(), options["lr"], hyper, first)
    else:
        eps = {"eps": 1e-8} if dense == "Adagrad" else {"weight_decay": 0.1}
        top = getattr(torch.optim, dense)(twin.top.parameters(), lr=options["lr"], **eps)
    data = list(batches(30))
    losses = train(model, ours, data)
    expected = []
    for batch, label in data:
        loss = (twin(batch) - label).square().mean()
        loss.backward()
        expected.append(float(loss.detach()))
        for optimizer in (tables, top):
            optimizer.step()
            optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_same(model, twin, 1e-9)


def schedulers() -> list[str]:
    found = []
    for name, kind in vars(lr_scheduler).items():
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler):
            if kind.__module__ == lr_scheduler.__name__ and kind is not lr_scheduler.LRScheduler:
                found.append(name)
    return sorted(set(found) - {"_LRScheduler"})


def make_schedule(name: str, optimizer: Any) -> Any:
    kind = getattr(lr_scheduler, name)
    if name == "ChainedScheduler":
        return kind([lr_scheduler.StepLR(optimizer, 3), lr_scheduler.ConstantLR(optimizer)])
    if name == "SequentialLR":
        parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return kind(optimizer, parts, [4])
    arguments: dict[str, dict[str, Any]] = {
        "LambdaLR": {"lr_lambda": lambda e: 1 / (1 + e)},
        "MultiplicativeLR": {"lr_lambda": lambda e: 0.9},
        "StepLR": {"step_size": 3},
        "MultiStepLR": {"milestones": [2, 5]},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 10},
        "CosineAnnealingWarmRestarts": {"T_0": 4},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 12},
    }
    return kind(optimizer, **arguments.get(name, {}))


# torch's SequentialLR of before 2.6 warns of its own.
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("name", schedulers())
def test_every_scheduler(name: str, untouched: str) -> None:
    model = Model()
    twin = Twin(model)
    options = {"lr": 0.05, "momentum": 0.9} if untouched == "exact" else {"lr": 0.05}
    if name in ("CyclicLR", "OneCycleLR"):
        options = {"lr": 0.05, "momentum": 0.9}
        untouched = "exact"
    ours = hb.optim.SGD(model.parameters(), untouched=untouched, **options)
    theirs = torch.optim.SGD(twin.parameters(), **options)
    schedules = [make_schedule(name, o) for o in (ours, theirs)]
    for batch, label in batches(10):
        for m, o, s in zip((model, twin), (ours, theirs), schedules, strict=True):
            o.zero_grad()
            loss = (m(batch) - label).square().mean()
            loss.backward()
            o.step()
            s.step(float(loss.detach())) if name == "ReduceLROnPlateau" else s.step()
    assert_same(model, twin, 1e-11)


def test_groups_give_tables_their_own_rates() -> None:
    model = Model()
    twin = Twin(model)
    item = model.embeddings.parameter("item")
    rest = [p for p in model.parameters() if p is not item]
    ours = hb.optim.Adagrad([{"params": [item], "lr": 0.5}, {"params": rest}], lr=0.05)
    theirs = torch.optim.Adagrad(
        [
            {"params": [twin.item.weight], "lr": 0.5},
            {"params": [twin.user.weight, *twin.top.parameters()]},
        ],
        lr=0.05,
    )
    data = list(batches(15))
    assert train(model, ours, data) == pytest.approx(train(twin, theirs, data), rel=1e-11)
    assert_same(model, twin, 1e-12)


def test_groups_can_be_added_later() -> None:
    model = Model()
    twin = Twin(model)
    ours = hb.optim.Adagrad([model.embeddings.parameter("item")], lr=0.05)
    ours.add_param_group({"params": [model.embeddings.parameter("user")], "lr": 0.2})
    ours.add_param_group({"params": list(model.top.parameters()), "lr": 0.3})
    theirs = torch.optim.Adagrad(
        [
            {"params": [twin.item.weight]},
            {"params": [twin.user.weight], "lr": 0.2},
            {"params": list(twin.top.parameters()), "lr": 0.3},
        ],
        lr=0.05,
    )
    data = list(batches(10))
    train(model, ours, data)
    train(twin, theirs, data)
    assert_same(model, twin, 1e-12)


@pytest.mark.parametrize("backwards", [2, 3])
def test_accumulation_over_several_backwards(backwards: int) -> None:
    model = Model()
    twin = Twin(model)
    ours = hb.optim.Adagrad(model.parameters(), lr=0.1)
    theirs = torch.optim.Adagrad(twin.parameters(), lr=0.1)
    data = list(batches(12))
    losses = train(model, ours, data, backwards=backwards)
    assert losses == pytest.approx(train(twin, theirs, data, backwards=backwards), rel=1e-11)
    assert_same(model, twin, 1e-12)


@pytest.mark.parametrize("order", ["tables first", "dense first"])
def test_two_optimizers_over_the_halves_equal_one_over_all(order: str) -> None:
    one, two = Model(), Model()
    single = hb.optim.Adam(one.parameters(), lr=0.01)
    tables, dense = hb.split_parameters(two)
    assert [tuple(p.shape) for p in tables] == [(ROWS, DIM)] * 2
    assert len(dense) == 2
    halves: list[Any] = [hb.optim.Adam(tables, lr=0.01), torch.optim.Adam(dense, lr=0.01)]
    if order == "dense first":
        halves.reverse()
    for batch, label in batches(20):
        for model, optimizers in ((one, [single]), (two, halves)):
            (model(batch) - label).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, rows in tables_of(one).items():
        assert torch.equal(rows, tables_of(two)[name])
    assert torch.equal(one.top.weight, two.top.weight)


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_two_models_train_alternately_as_if_alone(untouched: str) -> None:
    def make(seed: int) -> tuple[Model, Any, list[Any]]:
        model = Model(dynamic=True)
        kind = hb.optim.Adam if seed else hb.optim.Adamax
        return model, kind(model.parameters(), lr=0.01, untouched=untouched), list(batches(8, seed))

    alone = []
    for seed in (0, 1):
        model, optimizer, data = make(seed)
        alone.append((train(model, optimizer, data), tables_of(model)))
    pair = [make(0), make(1)]
    losses: list[list[float]] = [[], []]
    for step in range(8):
        for i, (model, optimizer, data) in enumerate(pair):
            losses[i] += train(model, optimizer, [data[step]])
    for i, (expected, tables) in enumerate(alone):
        assert losses[i] == expected
        for name, rows in tables_of(pair[i][0]).items():
            assert torch.equal(rows, tables[name])


def test_dense_may_have_another_rule() -> None:
    model, twin_model = Model(), Model()
    twin = Twin(twin_model)
    ours = hb.optim.Adagrad(
        model.parameters(),
        lr=0.1,
        dense=lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    )
    tables = torch.optim.Adagrad([twin.item.weight, twin.user.weight], lr=0.1)
    top = torch.optim.SGD(twin.top.parameters(), lr=0.02, momentum=0.9)
    schedules = [lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, tables, top)]
    for batch, label in batches(12):
        (model(batch) - label).square().mean().backward()
        (twin(batch) - label).square().mean().backward()
        for optimizer in (ours, tables, top):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert_same(model, twin, 1e-11)


def test_dense_as_a_class_takes_the_rate() -> None:
    model = Model()
    twin = Twin(model)
    ours = hb.optim.RowwiseAdagrad(model.parameters(), lr=0.1, dense=torch.optim.RMSprop)
    top = torch.optim.RMSprop(twin.top.parameters(), lr=0.1)
    batch, label = next(batches(1))
    (model(batch) - label).square().mean().backward()
    (twin(batch) - label).square().mean().backward()
    ours.step()
    top.step()
    assert torch.equal(model.top.weight, twin.top.weight)
    with pytest.raises(hb.OptimizerError, match="must make a torch.optim.Optimizer"):
        hb.optim.SGD(Model().parameters(), dense=lambda groups: None)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "Adadelta", "Adamax"])
def test_decoupled_decay_shrinks_tables_and_dense_alike(name: str) -> None:
    model = Model()
    twin = Twin(model)
    options = {"lr": 0.01, "weight_decay": 0.5, "decoupled_weight_decay": True}
    ours = getattr(hb.optim, name)(model.parameters(), untouched="exact", **options)
    theirs = getattr(torch.optim, name)(twin.parameters(), lr=0.01)
    for batch, label in batches(10):
        (model(batch) - label).square().mean().backward()
        (twin(batch) - label).square().mean().backward()
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1 - 0.01 * 0.5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, twin, 1e-9)


def test_a_closure_is_called_with_gradients_on() -> None:
    model, twin_model = Model(), Model()
    batch, label = next(batches(1))
    optimizers = [hb.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin_model)]

    def closure() -> torch.Tensor:
        loss = (model(batch) - label).square().mean()
        loss.backward()
        return loss

    loss = optimizers[0].step(closure)
    expected = (twin_model(batch) - label).square().mean()
    expected.backward()
    optimizers[1].step()
    assert float(loss.detach()) == float(expected.detach())
    assert torch.equal(tables_of(model)["item"], tables_of(twin_model)["item"])


def test_a_loss_may_use_the_weights_of_a_static_table() -> None:
    model = Model()
    twin = Twin(model)
    ours = hb.optim.Adagrad(model.parameters(), lr=0.1)
    theirs = torch.optim.Adagrad(twin.parameters(), lr=0.1)
    for batch, label in batches(4):
        weight = model.embeddings.parameter("item")
        ((model(batch) - label).square().mean() + 0.1 * weight.square().sum()).backward()
        ((twin(batch) - label).square().mean() + 0.1 * twin.item.weight.square().sum()).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, twin, 1e-11)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pooling_does_not_change_an_adagrad_step(dtype: torch.dtype) -> None:
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ids = torch.tensor([0, 1, 0], dtype=dtype)
    single = hb.Embedding(3, 2, _weight=weights.clone())
    pooled = hb.EmbeddingBag(3, 2, mode="sum", _weight=weights.clone())
    for layer, given in ((single, ids), (pooled, ids[None])):
        optimizer = hb.optim.Adagrad(layer.parameters(), lr=0.1)
        layer(given).sum().backward()
        optimizer.step()
    assert torch.equal(
        single.weight.grad.coalesce().to_dense(), pooled.weight.grad.coalesce().to_dense()
    )
    assert torch.equal(single.weight, pooled.weight)
    assert not torch.equal(single.weight[0], weights[0])
