"""Ids that go: as though they had never come, in every place."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from forgotten import check_forgotten
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_in import PLACES, collection, step
from torch import Tensor

import hotbed as hb
from hotbed.group import pool
from hotbed.places import core_backed

pytestmark = pytest.mark.filterwarnings("default:The budget holds:UserWarning")

USER = hb.Table("user", 48, init=hb.init.Normal(0.0, 1.0))


def ids_of(number: int) -> Tensor:
    chance = torch.Generator().manual_seed(number)
    return torch.randint(0, 900, (70,), generator=chance) * 7 - 1000


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_with_the_same_bits_everywhere(
    tmp_path: Path, place: str, untouched: str
) -> None:
    """Against rows in memory that a dict forgets: erased ones begin anew."""

    def run(where: str, folder: Path) -> tuple[Any, Any, list[int]]:
        model = collection(where, folder, USER, hb.Table("other", 48))
        optimizer = hb.optim.Adam(model.parameters(), lr=0.1, untouched=untouched)
        data = [{"user": ids_of(n), "other": ids_of(n + 50)} for n in range(30)]
        gone = []
        for number, batch in enumerate(hb.lookahead(data, model)):
            step(model, optimizer, batch)
            if number % 4 == 3:
                gone.append(model.erase("user", torch.cat([ids_of(number - 2), ids_of(777)])))
        return model, optimizer, gone

    model, optimizer, gone = run(place, tmp_path / "a")
    expected, its_optimizer, its_gone = run("memory", tmp_path / "b")
    assert gone == its_gone and all(gone)
    for name in model.tables:
        assert all(map(torch.equal, model.rows(name), expected.rows(name)))
        assert model.count(name) == len(expected.rows(name).ids)
    for one, other in zip(
        optimizer.state_dict()["state"].values(),
        its_optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert all(
            torch.equal(one[key], other[key]) for key in one if key not in ("step", "untouched")
        )


@pytest.mark.parametrize("place", PLACES)
def test_an_id_that_comes_again_is_a_new_row(tmp_path: Path, place: str) -> None:
    model = collection(place, tmp_path, USER)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.5)
    first = model.lookup("user", [5, 6])
    for _ in range(3):
        step(model, optimizer, {"user": torch.tensor([5, 6, 7])})
    after = model.lookup("user", [6, 7])
    assert not torch.equal(model.lookup("user", [5, 6]), first)
    assert model.erase("user", [5, 5, 99]) == 1
    assert model.rows("user").ids.tolist() == [6, 7] and model.count("user") == 2
    assert torch.equal(model.lookup("user", [5]), first[:1])
    assert torch.equal(model.lookup("user", [6, 7]), after)
    step(model, optimizer, {"user": torch.tensor([5])})
    state = optimizer.state_dict()["state"][0]
    gradient = first[0].cos()
    assert state["ids"].tolist() == [5, 6, 7]
    torch.testing.assert_close(state["sum"][0], gradient**2)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_refused(tmp_path: Path, place: str) -> None:
    model = collection(place, tmp_path, USER, hb.Table("item", 3, 10))
    optimizer = hb.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(hb.IdError, match=r"'item': id 10 is outside \[0, 10\)"):
        model.erase("item", [1, 10])
    for wrong in ([[1]], [1.5], "a"):
        with pytest.raises(hb.InputError):
            model.erase("user", wrong)
    with pytest.raises(hb.TableError, match="no table 'nobody'"):
        model.erase("nobody", [1])
    batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([1, 1])}

    def loss() -> Tensor:
        return sum((vectors.sum() for vectors in model(batch).values()), torch.tensor(0.0))

    for name in ("user", "item"):
        stale = loss()
        stale.backward(retain_graph=True)
        with pytest.raises(
            hb.TableError, match=f"'{name}': rows cannot be erased while a gradient"
        ):
            model.erase(name, [1])
        optimizer.step()
        optimizer.zero_grad()
        assert model.erase(name, [1]) == 1
        with pytest.raises(hb.TableError, match="between this forward and its backward"):
            stale.backward()
        assert model.erase(name, []) == 0
    assert model.erase("user", [1]) == 1
    assert model.rows("user").ids.tolist() == [2]


DECAY = {"weight_decay": 0.05, "decoupled_weight_decay": True}
RULES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.05},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.5, **DECAY},
    "RowwiseAdagrad": {"lr": 0.1, "initial_accumulator_value": 0.25},
    "Adam": {"lr": 0.1, "amsgrad": True, **DECAY},
    "AdamW": {"lr": 0.1, "weight_decay": 0.05},
    "RowwiseAdam": {"lr": 0.1, **DECAY},
    "Adamax": {"lr": 0.1, **DECAY},
    "Adadelta": {"lr": 0.5, **DECAY},
    "RMSprop": {"lr": 0.1, "momentum": 0.5, "centered": True},
    "FTRL": {"lr": 0.1, "l1": 0.01, "beta": 0.5},
}
"""Steps of those with weight decay move rows that no batch touches."""


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("rule", RULES)
def test_an_id_is_as_if_no_batch_had_had_it(tmp_path: Path, rule: str, untouched: str) -> None:
    """In memory and tiers, in static and dynamic tables, with rows that steps move by themselves."""
    for place in ("memory", "host", "three"):
        tables = [
            hb.Table("user", 48, init=hb.init.Normal(0.0, 1.0), combiner="none"),
            hb.Table("item", 48, 100, init=hb.init.Normal(0.0, 1.0), combiner="none"),
        ]
        if place != "three":  # whose budget has room for rows of one size
            half = torch.bfloat16, hb.init.Normal(0.0, 1.0)
            tables.append(hb.Table("half", 6, 100, "none", *half))
        model, other = (collection(place, tmp_path / f"{place}{n}", *tables) for n in range(2))
        check_forgotten(
            model,
            other,
            lambda one: getattr(hb.optim, rule)(
                one.parameters(), untouched=untouched, **RULES[rule]
            ),
        )


Steps = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.lists(st.integers(0, 25), min_size=1, max_size=12)),
        st.tuples(st.just("erase"), st.lists(st.integers(-3, 28), max_size=12)),
        st.tuples(st.just("assign"), st.lists(st.integers(0, 25), min_size=1, max_size=5)),
        st.tuples(st.just("read"), st.lists(st.integers(0, 25), min_size=1, max_size=5)),
        st.tuples(st.just("clear"), st.just([])),
    ),
    max_size=25,
)


@pytest.mark.parametrize("place", PLACES)
@settings(deadline=None)
@given(steps=Steps)
def test_as_a_dict(place: str, steps: list[tuple[str, list[int]]], tmp_path_factory: Any) -> None:
    """Rows of width one; a step of SGD subtracts what came how often."""
    folder = tmp_path_factory.mktemp("rows")
    table = hb.Table("a", 1, combiner="none", init=hb.init.Constant(0.5))
    model = collection(place, folder, table)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.25)
    rows: dict[int, float] = {}
    for kind, ids in steps:
        given_ids = torch.tensor(ids, dtype=torch.int64)
        if kind == "train":
            model({"a": given_ids})["a"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for row in ids:
                rows[row] = rows.get(row, 0.5) - 0.25
        elif kind == "erase":
            assert model.erase("a", given_ids) == len(rows.keys() & {*ids})
            rows = {row: value for row, value in rows.items() if row not in ids}
        elif kind == "assign":
            model.assign("a", given_ids, given_ids[:, None].float())
            rows |= {row: float(row) for row in ids}
        elif kind == "clear":
            model.table("a").forget_rows()
            rows = {}
        else:
            found = model.lookup("a", given_ids).flatten().tolist()
            assert found == [rows.get(row, 0.5) for row in ids]
        assert model.count("a") == len(rows)
        looked_for = [*range(-3, 29)]
        assert model.contains("a", looked_for).tolist() == [row in rows for row in looked_for]
    found_ids, values = model.rows("a")
    assert dict(zip(found_ids.tolist(), values.flatten().tolist(), strict=True)) == rows
    if place in ("memory", "budget"):
        core = model.table("a").core
        slots = torch.empty_like(found_ids)
        core.find(found_ids.data_ptr(), len(found_ids), slots.data_ptr())
        assert sorted(slots.tolist()) == list(range(len(rows)))


def test_memory_of_rows_that_went_is_used_again() -> None:
    model = hb.EmbeddingCollection([hb.Table("a", 64)], storage=hb.Storage(host="2MB"))
    for start in range(0, 10**5, 2000):
        ids = torch.arange(start, start + 2000)
        model.assign("a", ids, torch.zeros(2000, 64))
        assert model.erase("a", ids) == 2000
    assert model.count("a") == 0


def test_the_most_used_ids_forget_them(tmp_path: Path) -> None:
    model = collection("host", tmp_path, USER)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.5)
    for number in range(8):
        step(model, optimizer, {"user": torch.tensor([1, 2, 3, 3, 10 + number])})
    assert [used.id for used in model.hottest("user", 3)] == [3, 1, 2]
    model.erase("user", [3, 2])
    assert [used.id for used in model.hottest("user", 1)] == [1]
    step(model, optimizer, {"user": torch.tensor([3])})
    assert {used.id: used.uses for used in model.hottest("user")}[3] == 1


def test_a_state_dict_takes_rows_away_and_leaves_the_others_their_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_backed, "rows_at_once", lambda core: 3)
    for storage in (None, hb.Storage(device=130_000, host="1MB")):
        model = hb.EmbeddingCollection([hb.Table("a", 2)], storage=storage)
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.5)
        step(model, optimizer, {"a": torch.arange(10)})
        saved = model.state_dict()
        step(model, optimizer, {"a": torch.arange(5, 20)})
        states = optimizer.state_dict()["state"][0]["sum"]
        model.load_state_dict(saved)
        assert model.rows("a").ids.tolist() == list(range(10))
        after = optimizer.state_dict()["state"][0]
        assert after["ids"].tolist() == list(range(10))
        assert torch.equal(after["sum"], states[:10])


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_go_just_before_a_backward_are_not_mistaken(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread erases when backward has begun and does not hold the table yet."""
    model = collection(place, tmp_path, USER)
    hb.optim.SGD(model.parameters(), lr=0.5)
    loss = model({"user": torch.tensor([1, 2, 3])})["user"].sum()

    def late(tables: Any) -> Any:
        thread = threading.Thread(target=model.erase, args=("user", [1]))
        thread.start()
        thread.join()
        return together(tables)

    together = pool.together  # type: ignore[attr-defined]
    monkeypatch.setattr(pool, "together", late)
    with pytest.raises(hb.TableError, match="erased from between this forward and its backward"):
        loss.backward()
    assert model.parameter("user").grad is None
