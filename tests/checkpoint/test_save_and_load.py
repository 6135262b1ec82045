"""A training that is saved and loaded goes on as if it had not been."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.small_models import batch_of, everything, made, same, train
from kept_in import PLACES
from torch import nn

import hotbed as hb
from hotbed.checkpoint import CheckpointError

RULES = [rule.__name__ for rule in hb.optim.RULES]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_it_goes_on_with_the_same_bits(tmp_path: Path, rule: str, untouched: str) -> None:
    options = {"untouched": untouched}
    if rule in ("SGD", "RMSprop") and untouched == "exact":
        options["momentum"] = 0.9 if rule == "SGD" else 0.0
    try:
        model, optimizer = made("memory", tmp_path, rule, **options)
    except hb.OptimizerError:
        pytest.skip("the rule cannot follow rows that no batch touches")
    train(model, optimizer, range(6))
    saved = hb.save(tmp_path / "run", model, optimizer, step=6)
    assert saved.step == 6 and saved.bytes > 0
    assert saved.rows == model.embeddings.count()
    losses = train(model, optimizer, range(6, 12))

    other, its_optimizer = made("memory", tmp_path, rule, **options)
    train(other, its_optimizer, range(20, 23))  # what is to be forgotten
    restored = hb.load(tmp_path / "run", other, its_optimizer)
    assert (restored.step, restored.missing, restored.unexpected) == (6, [], [])
    assert train(other, its_optimizer, range(6, 12)) == losses
    assert same(everything(other, its_optimizer), everything(model, optimizer))


@pytest.mark.parametrize("loaded", PLACES)
@pytest.mark.parametrize("kept", PLACES)
def test_from_any_place_into_any_other(tmp_path: Path, kept: str, loaded: str) -> None:
    model, optimizer = made(kept, tmp_path / "a", "Adam")
    train(model, optimizer, range(6))
    hb.save(tmp_path / "run", model, optimizer, step=6)
    losses = train(model, optimizer, range(6, 9))
    other, its_optimizer = made(loaded, tmp_path / "b", "Adam")
    train(
        other, its_optimizer, range(20, 30)
    )  # what is to be forgotten, also of rows that are not saved
    hb.load(tmp_path / "run", other, its_optimizer)
    assert train(other, its_optimizer, range(6, 9)) == losses
    for name in ("item", "user"):
        for mine, theirs in zip(
            model.embeddings.rows(name), other.embeddings.rows(name), strict=True
        ):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("places", [("memory", "ssd"), ("ssd", "memory"), ("ssd", "ssd")])
@pytest.mark.parametrize("scheduled", [False, True])
def test_rows_that_are_behind_stay_so(
    tmp_path: Path, places: tuple[str, str], scheduled: bool
) -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None

    options: dict[str, Any] = {
        "untouched": "exact",
        "weight_decay": 0.01,
        "decoupled_weight_decay": True,
    }
    model, optimizer = made(places[0], tmp_path / "a", "Adam", **options)
    scheduler = schedule(optimizer)
    train(model, optimizer, range(6), scheduler)
    hb.save(tmp_path / "run", model, optimizer, step=6, scheduler=scheduler)
    losses = train(model, optimizer, range(6, 14), scheduler)
    other, its_optimizer = made(places[1], tmp_path / "b", "Adam", **options)
    its_scheduler = schedule(its_optimizer)
    hb.load(tmp_path / "run", other, its_optimizer, scheduler=its_scheduler)
    assert train(other, its_optimizer, range(6, 14), its_scheduler) == losses
    for name in ("item", "user"):
        mine, theirs = model.embeddings.rows(name), other.embeddings.rows(name)
        assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.values, theirs.values)


@pytest.mark.parametrize("place", ["memory", "ssd"])
@pytest.mark.parametrize("states", [True, False])
def test_without_an_optimizer_rows_are_as_the_last_step_left_them(
    tmp_path: Path, place: str, states: bool
) -> None:
    options: dict[str, Any] = {
        "untouched": "exact",
        "weight_decay": 0.01,
        "decoupled_weight_decay": True,
    }
    model, optimizer = made(place, tmp_path / "a", "Adam", **options)
    train(model, optimizer, range(6))
    hb.save(tmp_path / "run", model, optimizer, step=6, states=states)
    torch.manual_seed(9)
    other = type(model)("memory", tmp_path / "b")
    hb.load(tmp_path / "run", other)
    for name in ("item", "user"):
        mine, theirs = model.embeddings.rows(name), other.embeddings.rows(name)
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.allclose(mine.values, theirs.values, rtol=1e-6, atol=0)
        assert other.embeddings.table(name).rule is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = made("memory", tmp_path, dtype=dtype)
    train(model, optimizer, range(4))
    hb.save(tmp_path / "run", model, optimizer, step=4)
    other, its_optimizer = made("memory", tmp_path, dtype=dtype)
    hb.load(tmp_path / "run", other, its_optimizer)
    assert same(everything(other, its_optimizer), everything(model, optimizer))
    single = type(model)("memory", tmp_path)
    hb.load(tmp_path / "run", single)
    values = model.embeddings.rows("user").values
    assert torch.equal(single.embeddings.rows("user").values, values.float())


def test_random_states_schedulers_loaders_and_torch_optimizers(tmp_path: Path) -> None:
    class Loader:
        position = 0

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizers = [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[1].parameters())]
    model(torch.randn(5, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [2, 5])
    loader = Loader()
    loader.position = 7
    saved = hb.save(
        tmp_path, model, optimizers, step=1, scheduler=[scheduler], loader=loader, states=False
    )
    drawn = torch.rand(3), np.random.rand(), random.random()
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    others = [torch.optim.Adam(fresh[0].parameters()), torch.optim.SGD(fresh[1].parameters())]
    its_scheduler = torch.optim.lr_scheduler.MultiStepLR(others[0], [3])
    its_loader = Loader()
    hb.load(saved.path, fresh, others, scheduler=its_scheduler, loader=its_loader)
    assert its_loader.position == 7
    assert its_scheduler.milestones == scheduler.milestones
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1:] == (np.random.rand(), random.random())
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert str(others[0].state_dict()) == str(optimizers[0].state_dict())

    state = torch.get_rng_state()
    hb.load(saved.path, fresh)  # to look at it, and not to train on
    assert torch.equal(torch.get_rng_state(), state)


def test_static_and_dynamic_tables_take_each_others_rows(tmp_path: Path) -> None:
    static = hb.EmbeddingCollection([hb.Table("a", 2, rows=9)], seed=0)
    dynamic = hb.EmbeddingCollection([hb.Table("a", 2)], seed=1)
    hb.save(tmp_path / "static", static, step=0)
    hb.load(tmp_path / "static", dynamic)
    assert torch.equal(dynamic.rows("a").values, static.rows("a").values)
    dynamic.erase("a", [0, 3])
    dynamic.assign("a", [5], torch.tensor([[7.0, 8.0]]))
    hb.save(tmp_path / "dynamic", dynamic, step=0)
    hb.load(tmp_path / "dynamic", static)
    assert static.lookup("a", [5]).tolist() == [[7.0, 8.0]]
    dynamic.assign("a", [9], torch.zeros(1, 2))
    hb.save(tmp_path / "dynamic", dynamic, step=1)
    with pytest.raises(CheckpointError, match=r"rows-0-0.safetensors: the id 9 of .* outside"):
        hb.load(tmp_path / "dynamic", static)


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path)
    train(model, optimizer, range(2))
    hb.save(tmp_path / "run", model, optimizer, step=2)
    with pytest.raises(CheckpointError, match="was saved with dim 4, and has 5"):
        hb.load(tmp_path / "run", Holder(hb.Table("item", 5, rows=60), hb.Table("user", 3)))
    with pytest.raises(CheckpointError, match="was saved with 60 rows, and has 61"):
        hb.load(tmp_path / "run", Holder(hb.Table("item", 4, rows=61), hb.Table("user", 3)))
    renamed = Holder(hb.Table("item", 4, rows=60), hb.Table("person", 3))
    with pytest.raises(
        CheckpointError,
        match=r"Only in the model: embeddings.person. Only in the checkpoint: embeddings.user",
    ):
        hb.load(tmp_path / "run", renamed)
    found = hb.load(tmp_path / "run", renamed, strict=False)
    assert found.missing == ["embeddings.person"]
    assert found.unexpected == ["embeddings.user", "seen", "top.weight", "top.bias"]
    ids = torch.arange(60)
    assert torch.equal(renamed.embeddings.lookup("item", ids), model.embeddings.lookup("item", ids))
    other, adam = made("memory", tmp_path, "Adam")
    with pytest.raises(
        CheckpointError, match=r"'embeddings.item' was saved with another optimizer"
    ):
        hb.load(tmp_path / "run", other, adam)
    hb.save(tmp_path / "weights", model, optimizer, step=2, states=False)
    again, adagrad = made("memory", tmp_path)
    with pytest.raises(CheckpointError, match="was saved without optimizer states"):
        hb.load(tmp_path / "weights", again, adagrad)
    found = hb.load(tmp_path / "weights", again, adagrad, strict=False)
    assert found.missing == ["states of embeddings.item", "states of embeddings.user"]


@pytest.mark.parametrize(
    ("rule", "option", "was", "now"),
    [
        ("Adagrad", "initial_accumulator_value", 0.0, 0.5),
        ("Adam", "amsgrad", False, True),
        ("Adam", "untouched", "lazy", "exact"),
    ],
)
def test_an_optimizer_with_another_option_is_another(
    tmp_path: Path, rule: str, option: str, was: Any, now: Any
) -> None:
    hb.save(tmp_path / "run", *made("memory", tmp_path, rule, **{option: was}), step=0)
    with pytest.raises(CheckpointError, match=f"another optimizer: {option} {was!r}, now {now!r}"):
        hb.load(tmp_path / "run", *made("memory", tmp_path, rule, **{option: now}))


@pytest.mark.parametrize("saved", ["lazy", "exact"])
@pytest.mark.parametrize("own", ["lazy", "exact"])
def test_an_optimizer_that_is_not_given_keeps_its_states(
    tmp_path: Path, saved: str, own: str
) -> None:
    model, optimizer = made("memory", tmp_path, "Adam", untouched=saved)
    train(model, optimizer, range(3))
    hb.save(tmp_path / "run", model, optimizer, step=3)
    other, its_optimizer = made("memory", tmp_path, "Adam", untouched=own)
    train(other, its_optimizer, range(5))
    if saved == "exact":
        with pytest.raises(CheckpointError, match="Give load its optimizer, or load before"):
            hb.load(tmp_path / "run", other)
        return
    before = its_optimizer.state_dict()["state"][0]
    hb.load(tmp_path / "run", other)
    after = its_optimizer.state_dict()["state"][0]
    assert after["step"] == before["step"] == 5
    assert torch.equal(before["exp_avg"], after["exp_avg"])
    ids = torch.arange(60)
    assert torch.equal(other.embeddings.lookup("item", ids), model.embeddings.lookup("item", ids))


class Holder(nn.Module):
    def __init__(self, *tables: hb.Table) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(list(tables), seed=0)


def test_a_gradient_that_waits_is_refused(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path)
    model(batch_of(0)).sum().backward()
    with pytest.raises(CheckpointError, match="a gradient waits"):
        hb.save(tmp_path / "run", model, optimizer, step=0)
    assert not (tmp_path / "run").exists()
    optimizer.step()
    hb.save(tmp_path / "run", model, optimizer, step=1)


@pytest.mark.parametrize("options", [{"step": -1}, {"step": True}, {"step": 1, "keep": 0}])
def test_numbers_that_are_none(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="must be an integer from"):
        hb.save(tmp_path / "run", nn.Linear(1, 1), **options)
    assert not (tmp_path / "run").exists()


def test_shared_weights_and_one_table_in_two_modules(tmp_path: Path) -> None:
    inner = hb.EmbeddingCollection([hb.Table("a", 2)], seed=0)
    model = nn.ModuleDict({"one": inner, "two": inner, "x": nn.Linear(2, 2), "y": nn.Linear(2, 2)})
    model["y"].weight = model["x"].weight
    inner.assign("a", [1, 2], torch.ones(2, 2))
    assert hb.save(tmp_path, model, step=0).rows == 2
    hb.load(tmp_path, model)
    assert inner.count() == 2


def test_rows_that_were_not_saved_owe_no_steps(tmp_path: Path) -> None:
    """To an optimizer that is not given, whose rows were behind."""
    model = type(made("memory", tmp_path)[0])("host", tmp_path / "a")
    model.embeddings.assign("item", [3, 4], torch.ones(2, 4))
    hb.save(tmp_path / "run", model, step=0)
    options = {"untouched": "exact", "weight_decay": 0.1, "decoupled_weight_decay": True}
    other, optimizer = made("memory", tmp_path / "b", "Adam", **options)
    train(other, optimizer, range(5))
    hb.load(tmp_path / "run", other)
    ids = torch.arange(60)
    assert torch.equal(other.embeddings.lookup("item", ids), model.embeddings.lookup("item", ids))
    rows = other.embeddings.rows("item").values
    assert torch.equal(rows, model.embeddings.lookup("item", ids))


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"whole": whole, "rows": whole[1:], "column": whole[:, 2], "turned": whole.t()}

    class Loader:
        state: dict[str, torch.Tensor] = {}

        def state_dict(self) -> dict[str, torch.Tensor]:
            return state

        def load_state_dict(self, found: dict[str, torch.Tensor]) -> None:
            self.state = found

    loader = Loader()
    model = nn.Linear(1, 1)
    hb.save(tmp_path, model, step=0, loader=loader)
    hb.load(tmp_path, model, loader=loader)
    assert same(loader.state, state)
    loader.state["whole"].zero_()
    assert torch.equal(loader.state["rows"], whole[1:])


def test_modules_are_told_the_version_that_was_saved(tmp_path: Path) -> None:
    class Versioned(nn.Module):
        _version = 2
        told = None

        def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *rest: Any) -> None:
            self.told = about.get("version")

    class Later(Versioned):
        _version = 3

    hb.save(tmp_path, nn.Sequential(nn.Linear(1, 1), Versioned()), step=0)
    model = nn.Sequential(nn.Linear(1, 1), Later())
    hb.load(tmp_path, model)
    assert model[1].told == 2


def test_the_reader_of_the_docs_reads_it(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "format.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    model, optimizer = made("memory", tmp_path)
    train(model, optimizer, range(3))
    saved = hb.save(tmp_path / "run", model, optimizer, step=3)
    for name in model.embeddings.tables:
        ids, weights = names["read"](saved.path, f"embeddings.{name}")
        order = ids.argsort()
        rows = model.embeddings.rows(name)
        assert (ids[order] == rows.ids.numpy()).all()
        assert (weights[order] == rows.values.numpy()).all()
    assert len(code.splitlines()) <= 17


def test_names_that_begin_as_others_do(tmp_path: Path) -> None:
    tables = [hb.Table("user", 4), hb.Table("user/clicks", 3), hb.Table("user/states", 2, rows=9)]

    def made_again() -> tuple[Any, Any]:
        model = hb.EmbeddingCollection(tables, seed=1)
        return model, hb.optim.Adam(model.parameters(), lr=0.1)

    (model, optimizer), (other, its_optimizer) = made_again(), made_again()
    vectors = model({table.name: torch.arange(5) for table in tables})
    sum(v.sin().sum() for v in vectors.values()).backward()
    optimizer.step()
    optimizer.zero_grad()
    hb.save(tmp_path, model, optimizer, step=1)
    hb.load(tmp_path, other, its_optimizer)
    for table in tables:
        mine, theirs = (m.rows(table.name) for m in (model, other))
        assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.values, theirs.values)


def test_a_gradient_that_waits_when_a_checkpoint_is_loaded_is_refused(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(2))
    hb.save(tmp_path / "run", model, optimizer, step=2)
    model(batch_of(5)).sum().backward()
    with pytest.raises(CheckpointError, match="a gradient waits for its step, and would reach"):
        hb.load(tmp_path / "run", model, optimizer)
    optimizer.zero_grad()
    assert hb.load(tmp_path / "run", model, optimizer).step == 2


def test_tables_that_mean_something_else(tmp_path: Path) -> None:
    hb.save(tmp_path, hb.EmbeddingCollection([hb.Table("t", 4, padding_idx=3)]), step=0)
    others = {
        "combiner": hb.Table("t", 4, padding_idx=3, combiner="mean"),
        "padding_idx": hb.Table("t", 4),
        "init": hb.Table("t", 4, padding_idx=3, init=hb.init.Zeros()),
    }
    for field, table in others.items():
        other = hb.EmbeddingCollection([table])
        with pytest.raises(CheckpointError, match=f"was saved with {field} .*strict=False"):
            hb.load(tmp_path, other)
        assert hb.load(tmp_path, other, strict=False).step == 0


def test_what_was_saved_and_is_not_given_is_told(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    hb.save(tmp_path / "run", model, optimizer, step=0, scheduler=scheduler)
    assert hb.load(tmp_path / "run", model, optimizer).unexpected == ["schedulers"]
    assert hb.load(tmp_path / "run", model).unexpected == []
    with pytest.raises(CheckpointError, match="has 1 schedulers, and 2 were given"):
        hb.load(tmp_path / "run", model, optimizer, scheduler=[scheduler, scheduler])
    for wrong in ({}, 7, [7]):
        with pytest.raises(
            CheckpointError, match=r"need state_dict\(\), which one of the type (dict|int) has"
        ):
            hb.save(tmp_path / "run", model, wrong, step=1)
    with pytest.raises(CheckpointError, match="is empty"):
        hb.load("", model)


@pytest.mark.parametrize("rows", [200_000])
def test_a_static_table_in_tiers_stores_no_more_rows_than_were_saved(
    tmp_path: Path, rows: int
) -> None:
    def made_in(name: str) -> tuple[Any, Any]:
        storage = hb.Storage(host="4MB", ssd=tmp_path / name)
        model = hb.EmbeddingCollection([hb.Table("t", 4, rows=rows)], seed=1, storage=storage)
        options = {"lr": 0.1, "weight_decay": 0.1, "untouched": "exact"}
        return model, hb.optim.AdamW(model.parameters(), **options)

    (model, optimizer), (other, its_optimizer) = made_in("a"), made_in("b")
    for trained, by in ((model, optimizer), (other, its_optimizer)):
        for step in range(3):
            trained({"t": torch.arange(step, step + 9)})["t"].sin().sum().backward()
            by.step()
            by.zero_grad()
    hb.save(tmp_path / "run", model, optimizer, step=3)
    hb.load(tmp_path / "run", other, its_optimizer)
    assert len(other.table("t").stored_ids()) == 11
    ids = torch.tensor([0, 5, 10, 50, rows - 1])
    assert torch.equal(other.lookup("t", ids), model.lookup("t", ids))


def test_what_is_no_model(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(2, 1)
    for wrong in (model.state_dict(), "run", None):
        with pytest.raises(CheckpointError, match=r"expected a torch.nn.Module as model, got"):
            hb.save(tmp_path / "run", wrong, step=1)
        with pytest.raises(CheckpointError, match=r"expected a torch.nn.Module as model, got"):
            hb.load(tmp_path / "run", wrong)
    assert not (tmp_path / "run").exists()
