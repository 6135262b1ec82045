"""Checkpoints that hold what has changed since another one: what is loaded is what was there."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.grown_runs import assert_reads_as, grown, loaded
from checkpoint.saved_models import MANIFEST
from checkpoint.small_models import ROWS, batch_of, made, train
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_in import PLACES, collection
from kept_in import step as train_on

import hotbed as hb
import hotbed.checkpoint.inspect
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.deltas import mark_since
from hotbed.table.live import live_table
from hotbed.table.lookups import changed_records_of


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("rule", ["Adam", "RowwiseAdagrad"])
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_from_a_chain_with_the_same_bits(
    tmp_path: Path, place: str, rule: str, untouched: str
) -> None:
    run, options = tmp_path / "run", {"untouched": untouched}
    model, optimizer = made(place, tmp_path / "own", rule, **options)
    for number in range(4):
        train(model, optimizer, range(3 * number, 3 * number + 3))
        saved = hb.save(run, model, optimizer, step=number, delta=True)
        assert bool(saved.base) == (number > 0 and place not in ("host", "three"))
    assert_reads_as(run, model, optimizer, rule, **options)
    losses = train(model, optimizer, range(20, 24))
    other, its_optimizer = loaded(run, rule, **options)
    assert train(other, its_optimizer, range(20, 24)) == losses


ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(0, 30)),
    st.tuples(st.just("look"), st.integers(0, 30)),
    st.tuples(st.just("erase"), st.sets(st.integers(0, 39), max_size=6)),
    st.tuples(st.just("assign"), st.sets(st.integers(0, 39), min_size=1, max_size=4)),
    st.tuples(st.just("save"), st.sampled_from(["delta", "base", "whole", "elsewhere"])),
    st.tuples(st.just("load"), st.integers(0, 5)),
    st.tuples(st.just("forget"), st.just(0)),
)


def user_ids(numbers: set[int]) -> torch.Tensor:
    return torch.tensor(sorted(numbers), dtype=torch.int64) * 2**40 - 1


@settings(max_examples=examples(25, 1500))
@given(
    actions=st.lists(ACTIONS, min_size=4, max_size=16),
    rule=st.sampled_from(["Adam", "Adagrad", "SGD"]),
    untouched=st.sampled_from(["lazy", "exact"]),
    place=st.sampled_from(["memory", "ssd"]),
)
def test_whatever_comes_in_between(
    actions: list[tuple[str, Any]], rule: str, untouched: str, place: str
) -> None:
    options: dict[str, Any] = {"untouched": untouched}
    if rule == "SGD":
        options["momentum"] = 0.9
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        model, optimizer = made(place, Path(folder, "a"), rule, **options)
        saves: list[str] = []
        for number, (action, value) in enumerate(actions):
            match action, value:
                case "train", seed:
                    train(model, optimizer, range(seed, seed + 2))
                case "look", seed:
                    model(batch_of(seed))  # gives ids rows, and rows what they have missed
                case "erase", numbers:
                    model.embeddings.erase("user", user_ids(numbers))
                    model.embeddings.erase("item", sorted(numbers))
                case "assign", numbers:
                    ids = user_ids(numbers)
                    model.embeddings.assign("user", ids, torch.full((len(ids), 3), number / 100))
                case "forget", _:
                    live_table(model.embeddings.parameter("user")).forget_rows()
                case "load", at if saves:
                    hb.load(saves[at % len(saves)], model, optimizer)
                case "save", "elsewhere":
                    hb.save(Path(folder, "elsewhere"), model, optimizer, step=number)
                case "save", how:
                    base = saves[-1] if how == "base" and saves else None
                    try:
                        saved = hb.save(
                            run, model, optimizer, step=number, delta=how == "delta", base=base
                        )
                    except CheckpointError as error:
                        assert base is not None and "it is not known what has changed" in str(error)
                        continue
                    saves.append(saved.path)
                    assert_reads_as(saved.path, model, optimizer, rule, **options)
        for path in saves:
            loaded(path, rule, **options)


def test_only_rows_that_have_changed_are_there(tmp_path: Path) -> None:
    model, optimizer, _ = grown(tmp_path / "run", 3)
    before = {name: model.embeddings.rows(name) for name in ("item", "user")}
    gone = before["user"].ids[:2]
    model.embeddings.erase("user", gone)
    model.embeddings.assign("item", [7, 8], torch.ones(2, 4))
    saved = hb.save(tmp_path / "run", model, optimizer, step=3, delta=True)
    about = hb.checkpoint.inspect.contents(saved.path)
    assert saved.rows == 2
    by_table = {one["table"]: (one["saved_rows"], one["removed"]) for one in about["tables"]}
    assert by_table == {"embeddings.item": (2, 0), "embeddings.user": (0, 2)}
    assert about["base"] == Path(saved.base or "").name == "step-000000000002"
    changes = hb.checkpoint.changes(tmp_path / "run", "embeddings.user", since=2)
    assert sorted(changes.erased) == sorted(gone.tolist()) and [*changes] == []
    (rows,) = hb.checkpoint.changes(tmp_path / "run", "embeddings.item", since=2)
    assert rows.ids.tolist() == [7, 8] and (rows.weights == 1).all()
    assert {*rows.states} == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("delta", [True, False])
def test_changes_take_one_checkpoint_to_another(tmp_path: Path, delta: bool) -> None:
    run = tmp_path / "run"
    model, optimizer = made("memory", tmp_path, "Adam")
    at: dict[int, dict[int, list[float]]] = {}
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        if step == 2:
            model.embeddings.erase("user", model.embeddings.rows("user").ids[::3])
        hb.save(run, model, optimizer, step=step, delta=delta)
        ids, values = model.embeddings.rows("user")
        at[step] = dict(zip(ids.tolist(), values.tolist(), strict=True))
    for since in range(4):
        changes = hb.checkpoint.changes(run, "embeddings.user", since)
        assert (changes.since, changes.step) == (since, 4)
        rows = {id: row for id, row in at[since].items() if id not in set(changes.erased.tolist())}
        for some in changes:
            rows |= dict(zip(some.ids.tolist(), some.weights.tolist(), strict=True))
        assert rows == at[4]
    with pytest.raises(CheckpointError, match="no checkpoint of step 9. There are 0, 1, 2, 3"):
        hb.checkpoint.changes(run, "embeddings.user", 9)
    with pytest.raises(CheckpointError, match="no table 'x'"):
        hb.checkpoint.changes(run, "x", 0)
    wrong: list[tuple[Any, Any, Any]] = [(3, "x", 0), (run, ["x"], 0), (run, "x", "last")]
    for arguments in wrong:
        with pytest.raises(hb.InputError, match="path is|table is|since is"):
            hb.checkpoint.changes(*arguments)


@pytest.mark.parametrize("flush", [False, True])
def test_over_an_ssd_what_was_written_back_is_there(tmp_path: Path, flush: bool) -> None:
    """A few hundred rows of many fit into memory, so that rows leave it between two saves."""
    rows, run = 6000, tmp_path / "run"

    def small(folder: str) -> tuple[Any, Any]:
        model = collection(
            "ssd", tmp_path / folder, hb.Table("a", 16, rows=rows), hb.Table("b", 16)
        )
        return model, hb.optim.Adagrad(model.parameters(), lr=0.1)

    def batch(number: int, count: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(count) * 7 + 1000 * number) % rows
        return {"a": ids, "b": ids * 2**30}

    model, optimizer = small("own")
    for number in range(10):
        train_on(model, optimizer, batch(number, 300))
    whole = hb.save(run, model, optimizer, step=0, delta=True)
    sizes = []
    for number in range(1, 6):
        train_on(model, optimizer, batch(20 + number, 150))
        if flush:
            model.flush()
        model.erase("b", batch(20 + number, 5)["b"])
        sizes.append(hb.save(run, model, optimizer, step=number, delta=True))
    assert all(one.base and one.rows < whole.rows / 2 for one in sizes), (whole.rows, sizes)
    assert sizes[-1].rows >= 2 * 150 - 5
    other, its_optimizer = small("other")
    hb.load(run, other, its_optimizer)
    for name in ("a", "b"):
        for one, its in zip(model.rows(name), other.rows(name), strict=True):
            assert torch.equal(one, its)
    for one, its in zip(
        optimizer.state_dict()["state"].values(),
        its_optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert torch.equal(one["ids"], its["ids"]) and torch.equal(one["sum"], its["sum"])


def test_numbers_of_epochs_come_to_an_end(tmp_path: Path) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 2, delta=True)
    table = live_table(model.embeddings.parameter("item"))
    assert table is not None
    marks = [table.core.mark_changes() for _ in range(255)]
    assert table.core.knows_changes(marks[-1]) and not table.core.knows_changes(marks[0])
    train(model, optimizer, range(1))
    with pytest.raises(CheckpointError, match="it is not known what has changed"):
        hb.save(tmp_path / "run", model, optimizer, step=2, base=saves[-1].path)
    saved = hb.save(tmp_path / "run", model, optimizer, step=2, delta=True)
    by_table = {
        o["table"]: o["removed"] for o in hb.checkpoint.inspect.contents(saved.path)["tables"]
    }
    assert by_table == {"embeddings.item": None, "embeddings.user": 0}
    assert_reads_as(tmp_path / "run", model, optimizer, "Adam")


def test_weights_that_all_steps_move_are_whole(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(3))
    hb.save(tmp_path / "run", model, optimizer, step=0, states=False)
    train(model, optimizer, range(1))
    assert (
        hb.save(tmp_path / "run", model, optimizer, step=1, states=False, delta=True).base is None
    )
    assert hb.save(tmp_path / "run", model, optimizer, step=2, delta=True).base is None


@pytest.mark.parametrize("place", ["memory", "budget", "ssd"])
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("change", ["look", "erase static", "erase dynamic", "assign", "nothing"])
def test_each_kind_of_change_is_told(
    tmp_path: Path, change: str, untouched: str, place: str
) -> None:
    options = {"untouched": untouched}
    model, optimizer = made(place, tmp_path / "own", "Adam", **options)
    train(model, optimizer, range(4))
    hb.save(tmp_path / "run", model, optimizer, step=0)
    if change == "look":
        train(model, optimizer, range(1))
        hb.save(tmp_path / "run", model, optimizer, step=1, delta=True)
        model(batch_of(50))
        model(batch_of(2))
    elif change == "erase static":
        model.embeddings.erase("item", range(0, ROWS, 2))
    elif change == "erase dynamic":
        model.embeddings.erase("user", model.embeddings.rows("user").ids[::2])
    elif change == "assign":
        model.embeddings.assign("item", [1, 2], torch.ones(2, 4))
    saved = hb.save(tmp_path / "run", model, optimizer, step=2, delta=True)
    assert saved.base and (saved.rows == 0) == (
        change in ("nothing", "erase dynamic") or (change == "erase static" and place == "ssd")
    )
    assert_reads_as(tmp_path / "run", model, optimizer, "Adam", place=place, **options)


@pytest.mark.parametrize("place", ["memory", "ssd"])
def test_what_was_forgotten_once_is_not_known_later(tmp_path: Path, place: str) -> None:
    model, optimizer = made(place, tmp_path / "own", "Adam")
    train(model, optimizer, range(3))
    first = hb.save(tmp_path / "run", model, optimizer, step=0)
    live_table(model.embeddings.parameter("user")).forget_rows()
    train(model, optimizer, range(1))
    hb.save(tmp_path / "run", model, optimizer, step=1)
    train(model, optimizer, range(1))
    with pytest.raises(
        CheckpointError, match="'embeddings.user': it is not known what has changed"
    ):
        hb.save(tmp_path / "run", model, optimizer, step=2, base=first.path)
    assert hb.save(tmp_path / "run", model, optimizer, step=2, delta=True).base
    assert_reads_as(tmp_path / "run", model, optimizer, "Adam", place=place)


def test_no_number_of_an_epoch_is_used_twice_while_somebody_reads(tmp_path: Path) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 2)
    table = live_table(model.embeddings.parameter("item"))
    assert table is not None
    mark = mark_since(table, json.loads((Path(saves[-1].path) / MANIFEST).read_text())["uid"])
    train(model, optimizer, range(2))
    reading = changed_records_of({table: mark})
    first = next(reading)[1].ids.tolist()
    marks = [table.core.mark_changes() for _ in range(300)]
    assert marks[0] and marks[-1] == 0 and table.core.knows_changes(mark)
    rest = [id for _, rows in reading for id in rows.ids.tolist()]
    assert len({*first, *rest}) == len(first + rest) > 0
    assert table.core.mark_changes() and not table.core.knows_changes(mark)
    with pytest.raises(hb.StorageError, match="not known any more what has changed"):
        next(changed_records_of({table: mark}))


def test_a_table_that_is_forgotten_while_it_is_read_is_told(tmp_path: Path) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 2)
    table = live_table(model.embeddings.parameter("item"))
    assert table is not None
    mark = mark_since(table, json.loads((Path(saves[-1].path) / MANIFEST).read_text())["uid"])
    train(model, optimizer, range(2))
    reading = changed_records_of({table: mark})
    next(reading)
    table.core.forget_changes()  # as a write through the handle in another thread makes it
    with pytest.raises(hb.StorageError, match="not known any more what has changed"):
        next(reading)
