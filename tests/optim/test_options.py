"""Options that change after an optimizer was made: tables follow as dense parameters do, or refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim.models import ALL, Model, backward
from torch import Tensor, nn

import hotbed as hb

MADE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"lr": 0.01, "momentum": 0.9},
    "FTRL": {"lr": 0.1},
}

# Option of a group → a value that no rule has by default, and under which the next step is another one.
OBEYED: dict[str, Any] = {
    "lr": 0.07,
    "momentum": 0.3,
    "dampening": 0.4,
    "weight_decay": 0.3,
    "lr_decay": 0.5,
    "eps": 0.05,
    "betas": (0.5, 0.6),
    "rho": 0.4,
    "alpha": 0.4,
    "lr_power": -0.3,
    "l1": 0.2,
    "l2": 0.3,
    "l2_shrinkage": 0.3,
    "beta": 0.6,
}
REFUSED: dict[str, Any] = {
    "maximize": True,
    "decoupled_weight_decay": True,
    "nesterov": True,
    "amsgrad": True,
    "centered": True,
    "initial_accumulator_value": 0.7,
}
SAME_NUMBERS = {"foreach": True}
"""What only says how torch computes."""

RULES = [*ALL, "SparseAdam"]


class Pair(nn.Module):
    """A table and a dense parameter of the same values, which always get the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        first = torch.tensor([[0.5], [-0.25], [1.0]], dtype=torch.float64)
        # One column: a rule with one state a row is then torch's.
        self.table = hb.Embedding.from_pretrained(first, freeze=False)
        self.dense = nn.Parameter(first.clone())

    def forward(self, targets: Tensor) -> Tensor:
        both = self.table(torch.arange(3)), self.dense
        return sum(((one - targets) ** 2).sum() for one in both)  # type: ignore[return-value]

    def values(self) -> Tensor:
        return torch.stack((self.table.weight.detach().clone(), self.dense.detach().clone()))


def made(name: str, **options: Any) -> tuple[Pair, Any]:
    pair = Pair()
    return pair, getattr(hb.optim, name)(pair.parameters(), **{**MADE.get(name, {}), **options})


def step(pair: Pair, optimizer: Any, count: int = 1) -> Tensor:
    for k in range(count):
        optimizer.zero_grad()
        pair(torch.tensor([[0.25], [0.5], [-1.0 - k]], dtype=torch.float64)).backward()
        optimizer.step()
    return pair.values()


def by_group(optimizer: Any, name: str, value: Any) -> None:
    optimizer.param_groups[0][name] = value


def by_loading(optimizer: Any, name: str, value: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][name] = value
    optimizer.load_state_dict(state)


def options_of(name: str) -> set[str]:
    return set(made(name)[1].param_groups[0]) - {"params"}


@pytest.mark.parametrize("name", RULES)
def test_every_option_is_known_here(name: str) -> None:
    assert options_of(name) <= OBEYED.keys() | REFUSED.keys() | SAME_NUMBERS.keys()


def cases(options: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, option) for name in RULES for option in sorted(options_of(name) & set(options))]


@pytest.mark.parametrize("change", [by_group, by_loading])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "option"), cases(OBEYED | SAME_NUMBERS))
def test_numbers_count_for_tables_and_dense_parameters_alike(
    name: str, option: str, fused: bool, change: Callable[..., None]
) -> None:
    pair, optimizer = made(name, fused=fused)
    step(pair, optimizer, 3)
    other, unchanged = made(name, fused=fused)
    step(other, unchanged, 3)
    change(optimizer, option, {**OBEYED, **SAME_NUMBERS}[option])
    table, dense = step(pair, optimizer, 2)
    # Lazy Adam adds eps to another root than dense Adam does.
    far = 0.5 if option == "eps" and "Adam" in name and name != "Adamax" else 1e-6
    torch.testing.assert_close(table, dense, rtol=far, atol=far / 10)
    moved = (torch.stack((table, dense)) - step(other, unchanged, 2)).abs().amax((1, 2))
    assert bool((moved == 0).all() if option in SAME_NUMBERS else (moved > 1e-5).all())


@pytest.mark.parametrize("change", [by_group, by_loading])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "option"), cases(REFUSED))
def test_what_decides_on_states_is_refused(
    name: str, option: str, fused: bool, change: Callable[..., None]
) -> None:
    pair, optimizer = made(name, fused=fused)
    before = step(pair, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    old = state["param_groups"][0][option]
    new = REFUSED[option] if old != REFUSED[option] else not old
    with pytest.raises(hb.OptimizerError, match=f"{name}: {option} of group 0"):
        change(optimizer, option, new)
        step(pair, optimizer)
    assert torch.equal(pair.values(), before)
    optimizer.zero_grad()
    optimizer.param_groups[0][option] = old
    assert_equal(optimizer.state_dict(), state)
    twin, unchanged = made(name, fused=fused)
    step(twin, unchanged, 2)
    assert torch.equal(step(pair, optimizer), step(twin, unchanged))


def assert_equal(one: Any, other: Any) -> None:
    """Of two state_dicts."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("change", [by_group, by_loading])
@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_momentum_may_change_and_neither_come_nor_go(
    name: str, change: Callable[..., None]
) -> None:
    for first, then in ((0.0, 0.5), (0.5, 0.0)):
        pair, optimizer = made(name, momentum=first)
        before = step(pair, optimizer)
        with pytest.raises(hb.OptimizerError, match="momentum of group 0 .*Make"):
            change(optimizer, "momentum", then)
            step(pair, optimizer)
        assert torch.equal(pair.values(), before)


@pytest.mark.parametrize("change", [by_group, by_loading])
@pytest.mark.parametrize(("name", "option"), [case for case in cases(OBEYED) if case[1] != "betas"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.1", None, [0.1, 0.2]])
def test_what_is_no_number_reaches_no_row(
    name: str, option: str, value: Any, change: Callable[..., None]
) -> None:
    pair, optimizer = made(name)
    before = step(pair, optimizer)
    with pytest.raises(hb.OptimizerError, match=f"{name}: {option} of group 0 is "):
        change(optimizer, option, value)
        step(pair, optimizer)
    assert torch.equal(pair.values(), before)


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), (0.9, 1.0), (None, 0.9)])
def test_betas_are_two(betas: Any) -> None:
    pair, optimizer = made("Adam")
    before = step(pair, optimizer)
    optimizer.param_groups[0]["betas"] = betas
    with pytest.raises(hb.OptimizerError, match="Adam: betas of group 0 is"):
        step(pair, optimizer)
    assert torch.equal(pair.values(), before)


@pytest.mark.parametrize(("name", "option"), cases(OBEYED | REFUSED))
def test_an_option_that_is_gone_is_named(name: str, option: str) -> None:
    pair, optimizer = made(name)
    before = step(pair, optimizer)
    del optimizer.param_groups[0][option]
    with pytest.raises(hb.OptimizerError, match=f"{option} of group 0 is missing"):
        step(pair, optimizer)
    assert torch.equal(pair.values(), before)


def test_a_number_may_be_a_tensor() -> None:
    pair, optimizer = made("Adam", lr=torch.tensor(0.01))
    other, plain = made("Adam", lr=0.01)
    torch.testing.assert_close(step(pair, optimizer, 3), step(other, plain, 3))
    optimizer.param_groups[0]["lr"].fill_(0.05)
    plain.param_groups[0]["lr"] = 0.05
    torch.testing.assert_close(step(pair, optimizer, 3), step(other, plain, 3))


def test_a_step_after_one_that_was_refused_takes_the_numbers_of_before() -> None:
    pair, optimizer = made("Adam")
    other, unchanged = made("Adam")
    good = optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = (0.1, 1.0)
    with pytest.raises(hb.OptimizerError, match="betas of group 0"):
        step(pair, optimizer)
    optimizer.param_groups[0]["betas"] = good
    assert torch.equal(step(pair, optimizer, 2), step(other, unchanged, 2))


def test_what_was_refused_is_refused_again() -> None:
    pair, optimizer = made("SGD", nesterov=True)
    before = step(pair, optimizer)
    optimizer.param_groups[0]["dampening"] = 0.5  # right by itself
    for _ in range(2):
        with pytest.raises(hb.OptimizerError, match="nesterov=True needs"):
            step(pair, optimizer)
    optimizer.param_groups[0].update(dampening=0, differentiable=True)
    for _ in range(2):
        with pytest.raises(hb.OptimizerError, match="differentiable=True cannot be honoured"):
            step(pair, optimizer)
    assert torch.equal(pair.values(), before)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
@pytest.mark.parametrize("change", [by_group, by_loading])
def test_what_only_torch_can_do_is_refused_later_too(
    option: str, change: Callable[..., None]
) -> None:
    pair, optimizer = made("Adam")
    before = step(pair, optimizer)
    with pytest.raises(hb.OptimizerError, match=f"{option}=True cannot be honoured"):
        change(optimizer, option, True)
        step(pair, optimizer)
    assert torch.equal(pair.values(), before)


@pytest.mark.parametrize("option", ["untouched", "fused", "replace_state", "dense"])
def test_options_of_the_whole_optimizer_are_none_of_groups(option: str) -> None:
    model = Model()
    with pytest.raises(hb.OptimizerError, match=f"{option} is an option of the whole optimizer"):
        hb.optim.Adam([{"params": model.parameters(), option: True}])
    assert model.embeddings.table("item").rule is None


def test_untouched_and_fused_stay() -> None:
    _, optimizer = made("Adam")
    for name, value in (("untouched", "exact"), ("fused", True)):
        with pytest.raises(AttributeError):
            setattr(optimizer, name, value)


def test_adamw_decays_decoupled_only() -> None:
    with pytest.raises(hb.OptimizerError, match="decoupled_weight_decay of group 0 is False"):
        hb.optim.AdamW([{"params": Model().parameters(), "decoupled_weight_decay": False}])


def test_groups_come_by_add_param_group_only() -> None:
    model = Model()
    optimizer = hb.optim.SGD(model.embeddings.parameters(), lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.top.weight]})
    backward(model)
    with pytest.raises(hb.OptimizerError, match="1 groups were added and param_groups has 2"):
        optimizer.step()


def test_a_group_that_is_wrong_leaves_all_tables_alone() -> None:
    model = Model()
    tables = [model.embeddings.parameter(name) for name in ("item", "user")]
    with pytest.raises(hb.OptimizerError, match="eps of group 1 is -1.0"):
        hb.optim.Adam([{"params": tables[0]}, {"params": tables[1], "eps": -1.0}])
    assert model.embeddings.table("item").rule is None
    optimizer = hb.optim.Adam(tables[:1])
    with pytest.raises(hb.OptimizerError, match="eps of group 1 is -1.0"):
        optimizer.add_param_group({"params": tables[1:], "eps": -1.0})
    assert model.embeddings.table("user").rule is None and len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": tables[1:]})
    backward(model)
    optimizer.step()
