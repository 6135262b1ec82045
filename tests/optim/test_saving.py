"""state_dict of hotbed.optim: aligned by id, complete, and loadable in any order."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from optim.models import ROWS, Model, Twin, assert_same, batches, tables_of, train

import hotbed as hb
from hotbed import _core

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("RowwiseAdagrad", {"lr": 0.1}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("FTRL", {"lr": 0.1, "l1": 0.01}),
]


def make(model: Model, name: str, options: dict[str, Any], untouched: str) -> tuple[Any, Any]:
    optimizer = getattr(hb.optim, name)(model.parameters(), untouched=untouched, **options)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=[n for n, _ in OPTIMIZERS])
def test_training_goes_on_as_if_never_stopped(
    name: str, options: dict[str, Any], dynamic: bool, untouched: str, order: str
) -> None:
    data = list(batches(24))
    model = Model(dynamic)
    optimizer, schedule = make(model, name, options, untouched)
    train(model, optimizer, data[:12], schedule)
    file = io.BytesIO()
    torch.save([x.state_dict() for x in (model, optimizer, schedule)], file)
    losses = train(model, optimizer, data[12:], schedule)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = Model(dynamic)
    optimizer2, schedule2 = make(again, name, options, untouched)
    train(again, optimizer2, list(batches(3, seed=9)), schedule2)  # to be overwritten
    parts: list[Any] = [again, optimizer2]
    states = saved[:2]
    if order == "optimizer first":
        parts.reverse()
        states = states[::-1]
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    schedule2.load_state_dict(saved[2])
    resumed = train(again, optimizer2, data[12:], schedule2)
    if untouched == "lazy":
        assert resumed == losses
        for table, rows in tables_of(model).items():
            assert torch.equal(rows, tables_of(again)[table])
    else:  # saving catches rows up in two parts, which rounds differently
        assert resumed == pytest.approx(losses, rel=1e-9)
        for table, rows in tables_of(model).items():
            torch.testing.assert_close(rows, tables_of(again)[table], rtol=0, atol=1e-9)


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_states_are_sorted_by_id_and_saving_changes_nothing(untouched: str) -> None:
    model = Model(dynamic=True)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01, untouched=untouched)
    data = list(batches(6))
    train(model, optimizer, data)
    before = {k: v.clone() for k, v in tables_of(model).items()}
    first = optimizer.state_dict()
    entry = first["state"][1]
    assert entry["step"] == 6
    assert entry["ids"].tolist() == sorted(entry["ids"].tolist())
    assert entry["ids"].tolist() == model.embeddings.rows("user").ids.tolist()
    assert entry["exp_avg"].shape == (len(entry["ids"]), 6)
    second = optimizer.state_dict()
    assert torch.equal(second["state"][1]["exp_avg"], entry["exp_avg"])
    for name, rows in tables_of(model).items():
        assert torch.equal(rows, before[name])


def test_static_and_dynamic_load_each_other() -> None:
    static, dynamic = Model(False), Model(True)
    a = hb.optim.Adagrad(static.parameters(), lr=0.1)
    b = hb.optim.Adagrad(dynamic.parameters(), lr=0.1)
    data = list(batches(10))
    train(static, a, data[:5])
    dynamic.load_state_dict(static.state_dict())
    b.load_state_dict(copy.deepcopy(a.state_dict()))  # torch shares dense states
    assert train(dynamic, b, data[5:]) == train(static, a, data[5:])


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    model, other = Model(), Model()
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, list(batches(2)))
    foreign = hb.optim.Adagrad(other.parameters(), lr=0.01)
    train(other, foreign, list(batches(2)))
    before = optimizer.state_dict()
    with pytest.raises(hb.OptimizerError, match="option lr_decay, so it is one of another"):
        optimizer.load_state_dict(foreign.state_dict())
    wrong = optimizer.state_dict()
    wrong["state"][0]["exp_avg"] = torch.zeros(ROWS, 3)
    with pytest.raises(hb.OptimizerError, match=r"exp_avg has shape \(30, 3\)"):
        optimizer.load_state_dict(wrong)
    wrong = optimizer.state_dict()
    wrong["state"][0]["ids"][-1] = ROWS
    with pytest.raises(hb.OptimizerError, match="id 30, which is outside"):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(
            torch.as_tensor(before["state"][0][name]), torch.as_tensor(after["state"][0][name])
        )


def test_a_state_too_large_to_copy_is_refused() -> None:
    model = Model()
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    _core.pretend_memory(1000)
    try:
        with pytest.raises(hb.OptimizerError, match="would copy 3360 bytes.*1000 are free"):
            optimizer.state_dict()
    finally:
        _core.pretend_memory(0)


def test_loading_weights_keeps_the_states() -> None:
    model = Model(dynamic=True)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    train(model, optimizer, list(batches(4)))
    states = optimizer.state_dict()["state"][1]
    model.load_state_dict(model.state_dict())
    again = optimizer.state_dict()["state"][1]
    assert torch.equal(states["ids"], again["ids"])
    assert torch.equal(states["sum"], again["sum"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_reading_is_what_training_will_see(dtype: torch.dtype) -> None:
    model = Model(dynamic=True, dtype=dtype)
    optimizer = hb.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, untouched="exact")
    train(model, optimizer, list(batches(8)))
    read = tables_of(model)
    with torch.no_grad():
        model.eval()
        batch, _ = next(batches(1, seed=5))
        out = model(batch)
        assert torch.equal(out, model(batch))
        model.train()
        for name, rows in tables_of(model).items():
            assert torch.equal(rows, read[name])
    train_out = model(batch)
    assert torch.equal(out, train_out.detach())
    for name, rows in tables_of(model).items():
        assert torch.equal(rows, read[name])


def test_assigned_rows_are_current() -> None:
    model = Model(dynamic=True)
    optimizer = hb.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, untouched="exact")
    train(model, optimizer, list(batches(5)))
    ids = torch.tensor([3, ROWS + 7])
    values = torch.ones(2, 6, dtype=torch.float64)
    model.embeddings.assign("user", ids, values)
    assert torch.equal(model.embeddings.lookup("user", ids), values)


def test_rows_never_met_follow_the_dense_optimizer_too() -> None:
    model = Model(dynamic=True)
    optimizer = hb.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, untouched="exact")
    first = model.embeddings.lookup("user", torch.tensor([ROWS + 1]))
    train(model, optimizer, list(batches(5)))
    expected = first * (1 - 0.01 * 0.5) ** 5
    got = model.embeddings.lookup("user", torch.tensor([ROWS + 1]))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    saved, states = model.state_dict(), optimizer.state_dict()
    again = Model(dynamic=True)
    other = hb.optim.AdamW(again.parameters(), lr=0.01, weight_decay=0.5, untouched="exact")
    again.load_state_dict(saved)
    other.load_state_dict(states)
    got = again.embeddings.lookup("user", torch.tensor([ROWS + 1]))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


TORCHS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("Adagrad", {"lr": 0.1}),
    ("Adam", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("Adamax", {"lr": 0.01}),
    ("Adadelta", {"lr": 1.0}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("name", "options"), TORCHS, ids=[f"{n}-{len(o)}" for n, o in TORCHS])
def test_a_state_dict_of_torch_loads(name: str, options: dict[str, Any], dynamic: bool) -> None:
    model = Model(dynamic)
    twin = Twin(model)
    theirs = getattr(torch.optim, name)(twin.parameters(), **options)
    train(twin, theirs, list(batches(6)))
    for table in ("item", "user"):
        rows = getattr(twin, table).weight.detach()
        model.embeddings.assign(table, torch.arange(ROWS), rows)
    model.top.load_state_dict(twin.top.state_dict())
    made_with = {k: v for k, v in options.items() if k != "lr"}  # which the state_dict has
    ours = getattr(hb.optim, name)(model.parameters(), untouched="exact", **made_with)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    data = list(batches(8, seed=1))
    assert train(model, ours, data) == pytest.approx(train(twin, theirs, data), rel=1e-9)
    assert_same(model, twin, 1e-9)


def test_a_state_dict_of_sparse_adam_loads() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.EmbeddingBag(ROWS, 6, mode="sum", sparse=True, dtype=torch.float64)
    sparse = torch.optim.SparseAdam(theirs.parameters(), lr=0.05, betas=(0.8, 0.99), eps=1e-4)
    ids = torch.randint(0, ROWS, (20, 7, 3))

    def step(layer: Any, optimizer: Any, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (layer(batch) ** 2).sum().backward()
        optimizer.step()

    for batch in ids[:10]:
        step(theirs, sparse, batch)
    ours = hb.EmbeddingBag.from_pretrained(theirs.weight.detach(), freeze=False, mode="sum")
    optimizer = hb.optim.SparseAdam(ours.parameters())
    assert isinstance(optimizer, hb.optim.Adam)
    optimizer.load_state_dict(copy.deepcopy(sparse.state_dict()))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    for batch in ids[10:]:
        step(theirs, sparse, batch)
        step(ours, optimizer, batch)
    torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach(), rtol=0, atol=1e-12)
    with pytest.raises(TypeError, match="untouched"):
        hb.optim.SparseAdam(ours.parameters(), untouched="exact")


def test_a_state_dict_that_is_none_changes_nothing() -> None:
    model = Model()
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, list(batches(2)))
    good = copy.deepcopy(optimizer.state_dict())

    def refused(match: str, **parts: Any) -> None:
        with pytest.raises(hb.OptimizerError, match=f"Adam: the loaded state {match}"):
            optimizer.load_state_dict({**good, **parts})

    refused("has state, param_groups: it is no", state=None)
    refused("has state, param_groups: it is no", param_groups={})
    (group,) = good["param_groups"]
    refused(r"has groups of \[3\] .* of \[4\]", param_groups=[{**group, "params": [0, 1, 2]}])
    refused(r"has groups of \[4, 0\]", param_groups=[group, {**group, "params": []}])
    refused("has an option rho", param_groups=[{**group, "rho": 0.9}])
    entry = good["state"][1]
    for step in (-1, 0.5, "two"):
        refused("has for table 'user' a step", state={**good["state"], 1: {**entry, "step": step}})
    missed = {"base": [1, 0], "last": {}}
    refused("has for table 'user' .* missed steps", state={1: {**entry, "untouched": missed}})
    for lost in ({"step": 3}, {"step": 3, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}):
        refused("of a dense parameter", state={**good["state"], 2: lost})
    again = optimizer.state_dict()
    assert again["param_groups"] == good["param_groups"]
    for index, states in good["state"].items():
        for name, value in states.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(again["state"][index][name]))


def test_hooks_of_state_dicts_meet_tables_too() -> None:
    """As those of wrappers that rename parameters or move states."""
    model = Model()
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, list(batches(2)))
    seen: list[int] = []
    optimizer.register_state_dict_post_hook(lambda _, made: seen.append(len(made["state"])))
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.append(int(optimizer._rules[model.embeddings.parameter("item")].steps))
    )
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = 7
    optimizer.load_state_dict(state)
    assert seen == [4, 7]


@pytest.mark.parametrize(("name", "value"), [("beta1", -1.5), ("lr", float("nan")), ("eps", -1.0)])
def test_missed_steps_with_numbers_that_no_step_can_have_had(name: str, value: float) -> None:
    model = hb.EmbeddingBag(5, 2, mode="sum")
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1, untouched="exact")
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["untouched"]["last"][name] = value
    with pytest.raises(hb.OptimizerError, match=f"{name} is {value}, which is outside"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "ids", [torch.zeros(1, 1).long(), torch.zeros(1), torch.zeros(1).short(), [0], torch.tensor(0)]
)
def test_ids_of_a_loaded_state_must_be_a_row_of_integers(ids: Any) -> None:
    layer = hb.Embedding(None, 2)
    optimizer = hb.optim.Adagrad(layer.parameters(), lr=0.1)
    layer(torch.tensor([3])).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["ids"] = ids
    with pytest.raises(hb.OptimizerError, match=r"must be \(n,\) int64"):
        optimizer.load_state_dict(saved)
    saved["state"][0]["ids"] = torch.tensor([3], dtype=torch.int32)
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("ratios", [[1.0], [0.5, 2.0, 1.0], "x"])
def test_rates_of_another_dense_optimizer_are_refused(ratios: object) -> None:
    """Of two groups with rates of their own; a state of the same loads."""

    def two_groups(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        (first, *others) = groups[0]["params"]
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.3}])

    model = Model(False)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.2, dense=two_groups)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["dense_lr_ratio"] == pytest.approx([0.5, 1.5])
    optimizer.load_state_dict(state)
    state["param_groups"][0]["dense_lr_ratio"] = ratios
    with pytest.raises(hb.OptimizerError, match="dense= makes 2 groups of it"):
        optimizer.load_state_dict(state)
