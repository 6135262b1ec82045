"""What optimizers are made with, and may not be."""

from __future__ import annotations

import contextlib
import decimal
import fractions
import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from optim.models import ALL, Model, backward, tables_of
from torch import nn

import hotbed as hb


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
    with pytest.raises(hb.OptimizerError, match="eps of group 0 changed from 1e-08 to 0.001"):
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
    with pytest.raises(hb.OptimizerError, match=f"SGD: lr of group 0 is {lr}"):
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


ODD = [
    float("nan"), float("inf"), -1, "0.1", [0.1], True, 10**400, 1j, object(), b"1", (0.9,), {},
    torch.ones(2), torch.tensor(0.5), np.array(0.1), np.ones(2), fractions.Fraction(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_odd_values_are_taken_or_an_error_of_ours(name: str) -> None:
    kind = getattr(hb.optim, name)
    named = set(inspect.signature(kind.__init__).parameters) - {
        "self",
        "params",
        "dense",
        "options",
    }
    for option, value in itertools.product(sorted(named), ODD):
        model = Model()
        try:
            optimizer = kind(model.parameters(), **{option: value})
        except hb.HotbedError:
            continue
        backward(model)
        with contextlib.suppress(hb.HotbedError):
            optimizer.step()


@pytest.mark.parametrize("option", ["fused", "replace_state", "capturable"])
def test_a_switch_is_on_or_off(option: str) -> None:
    with pytest.raises(hb.OptimizerError, match=f"{option} is 'no'; it must be True or False"):
        hb.optim.Adam(Model().parameters(), **{option: "no"})


@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [
        ("SGD", "lr", decimal.Decimal("0.1")),
        ("SGD", "lr", fractions.Fraction(1, 10)),
        ("SGD", "lr", 10**400),
        ("SGD", "lr", 1e38),
        ("SGD", "momentum", np.array(0.5)),
        ("SGD", "nesterov", np.array([True, False])),
        ("Adam", "lr", 1e38),
        ("Adam", "lr", "0.1"),
        ("Adam", "weight_decay", True),
        ("Adam", "weight_decay", torch.tensor([0.1])),
        ("Adam", "betas", torch.tensor(0.1)),
        ("Adam", "amsgrad", torch.ones(2)),
        ("Adagrad", "eps", np.array(1e-8)),
    ],
)
def test_what_torch_would_refuse_changes_nothing(rule: str, name: str, value: object) -> None:
    """Set later, where the tables' step comes before that of dense layers."""
    table, dense = hb.Embedding(9, 4), torch.nn.Linear(4, 1)
    optimizer = getattr(hb.optim, rule)([*table.parameters(), *dense.parameters()], lr=0.1)
    dense(table(torch.tensor([1, 2]))).sum().backward()
    before = table.weight.detach().clone(), dense.weight.detach().clone()
    optimizer.param_groups[0][name] = value
    with pytest.raises(hb.OptimizerError, match=name):
        optimizer.step()
    assert torch.equal(table.weight, before[0]) and torch.equal(dense.weight, before[1])


@pytest.mark.parametrize("value", [0.2, 1, np.float32(0.2), np.int64(1), torch.tensor(0.2)])
def test_numbers_of_others_are_taken(value: object) -> None:
    table, dense = hb.Embedding(9, 4), torch.nn.Linear(4, 1)
    optimizer = hb.optim.SGD([*table.parameters(), *dense.parameters()], lr=0.1)
    dense(table(torch.tensor([1, 2]))).sum().backward()
    optimizer.param_groups[0]["lr"] = value
    before = table.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(table.weight, before)
