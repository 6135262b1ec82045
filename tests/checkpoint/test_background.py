"""Saves in the background: what is loaded is what was there when they began, whatever changed meanwhile."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.grown_runs import loaded
from checkpoint.small_models import (
    Model,
    batch_of,
    everything,
    made,
    optimizer_of,
    same,
    train,
)
from checkpoint.test_deltas import user_ids
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_in import PLACES, storage_of

import hotbed as hb
from hotbed.places import core_backed
from hotbed.table.live import live_table


class Gate:
    """Lets so many chunks of rows pass from a snapshot to its files."""

    def __init__(self) -> None:
        self._left = threading.Semaphore(0)
        self._open = False

    def let(self, chunks: int) -> None:
        for _ in range(chunks):
            self._left.release()

    def open(self) -> None:
        self._open = True
        self._left.release()

    def wait(self) -> None:
        while not self._open and not self._left.acquire(timeout=60):
            raise AssertionError("nobody lets the rows pass")


@contextlib.contextmanager
def gated(at_once: int = 3) -> Iterator[Gate]:
    """For a ``with`` statement: rows are copied `at_once` at a time, when they are let pass."""
    gate, patch = Gate(), pytest.MonkeyPatch()
    records = core_backed.CoreSnapshot.records

    def waiting(self: Any, *, states: bool) -> Iterator[Any]:
        gate.wait()
        for chunk in records(self, states=states):
            yield chunk
            gate.wait()

    patch.setattr(core_backed.CoreSnapshot, "records", waiting)
    patch.setattr(core_backed, "rows_at_once", lambda core: at_once * core_backed._PARTS)
    try:
        yield gate
    finally:
        gate.open()
        patch.undo()


WIDTHS = {"Adam": 300, "Adagrad": 450, "SGD": 900}
"""Of rows that take 3,600 bytes with their states."""

ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(0, 30)),
    st.tuples(st.just("ahead"), st.integers(0, 30)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("look"), st.integers(0, 30)),
    st.tuples(st.just("erase"), st.sets(st.integers(0, 39), max_size=6)),
    st.tuples(st.just("assign"), st.sets(st.integers(0, 39), min_size=1, max_size=4)),
    st.tuples(st.just("write"), st.sets(st.integers(0, 39), min_size=1, max_size=4)),
    st.tuples(st.just("settle"), st.just(0)),
    st.tuples(st.just("pass"), st.integers(1, 9)),
    st.tuples(st.sampled_from(["forget", "load", "optimizer"]), st.just(0)),
)


def act(action: str, value: Any, model: Any, optimizer: Any, gate: Gate, whole: Path) -> Any:
    """Do one thing to a model, and return its optimizer."""
    match action:
        case "train":
            train(model, optimizer, range(value, value + 2))
        case "ahead":
            for batch in hb.lookahead(list(map(batch_of, range(value, value + 4))), model, depth=1):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        case "flush":
            model.embeddings.flush()
        case "look":
            model(batch_of(value))  # gives ids rows, and rows what they have missed
        case "erase":
            model.embeddings.erase("user", user_ids(value))
            model.embeddings.erase("item", sorted(value))
        case "assign":
            ids, dim = user_ids(value), model.embeddings.tables["user"].dim
            model.embeddings.assign("user", ids, torch.full((len(ids), dim), len(ids) / 100))
        case "write":
            with torch.no_grad():
                ids, dim = torch.tensor(sorted(value)), model.embeddings.tables["item"].dim
                model.embeddings.assign("item", ids, torch.rand(len(ids), dim))
        case "settle":
            model.embeddings.state_dict()
        case "pass":
            gate.let(value)
        case _:
            gate.open()  # all rows change: that waits for the save
            if action == "load":
                hb.load(whole, model, optimizer)
            elif action == "forget":
                live_table(model.embeddings.parameter("user")).forget_rows()
            else:
                options = {"lr": 0.005, "replace_state": True, "untouched": optimizer.untouched}
                optimizer = optimizer_of(model, type(optimizer).__name__, **options)
    return optimizer


@settings(max_examples=examples(40, 10_000))
@given(
    before=st.integers(0, 5),
    actions=st.lists(ACTIONS, min_size=3, max_size=14),
    rule=st.sampled_from(sorted(WIDTHS)),
    options=st.sampled_from([{}, {"untouched": "exact"}, {"fused": True}]),
    delta=st.booleans(),
    place=st.sampled_from(["memory", "tight"]),
)
def test_rows_are_those_of_the_moment(
    before: int,
    actions: list[tuple[str, Any]],
    rule: str,
    options: dict[str, Any],
    delta: bool,
    place: str,
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as ended,
        gated() as gate,
    ):
        run, whole = Path(folder, "run"), Path(folder, "whole")
        options = {**options, "lr": 0.005, "dims": (WIDTHS[rule], WIDTHS[rule] - 50)}
        model, optimizer = made(place, Path(folder, "a"), rule, **options)
        train(model, optimizer, range(before))
        hb.save(run, model, optimizer, step=0)
        train(model, optimizer, range(20, 20 + before))
        if before % 2:
            model.embeddings.erase("user", user_ids({3, 5, 7}))
        hb.save(whole, model, optimizer, step=0)
        random = torch.get_rng_state()
        saving = hb.save(run, model, optimizer, step=1, blocking=False, delta=delta)
        ended.callback(saving.wait_for_end)
        for action, value in actions:
            optimizer = act(action, value, model, optimizer, gate, whole)
        gate.open()
        saved = saving.wait()
        assert saved.step == 1 and bool(saved.base) == delta
        numbers = []
        for path in (run, whole):
            again, its_optimizer = loaded(path, rule, **options)
            assert torch.equal(torch.get_rng_state(), random)
            numbers.append(everything(again, its_optimizer))
            losses = train(again, its_optimizer, range(40, 42))
            numbers[-1] |= {str(at): loss for at, loss in enumerate(losses)}
        assert same(*numbers)


@pytest.mark.parametrize("place", PLACES)
def test_a_save_in_every_place(tmp_path: Path, place: str) -> None:
    """Where rows cannot be copied while they change, the save is complete when it returns."""
    model, optimizer = made(place, tmp_path / "own", "Adam")
    train(model, optimizer, range(4))
    want = everything(model)
    saving = hb.save(tmp_path / "run", model, optimizer, step=4, blocking=False)
    assert saving.done() or place in ("memory", "budget", "ssd")
    train(model, optimizer, range(4, 9))
    assert saving.wait().path.endswith("step-000000000004") and saving.error is None
    other, its_optimizer = loaded(tmp_path / "run", "Adam")
    assert same({k: v for k, v in everything(other).items() if k in want}, want)


@pytest.mark.parametrize("first", ["memory", "tight"])
def test_some_tables_in_memory_and_some_over_an_ssd(tmp_path: Path, first: str) -> None:
    """Both change while both are saved."""
    places = [first, "tight" if first == "memory" else "memory"]

    def both(folder: Path) -> tuple[Any, Any]:
        parts = [Model(place, folder / place, dims=(300, 250)) for place in places]
        model = torch.nn.ModuleList(parts)
        return model, hb.optim.Adam(model.parameters(), lr=0.005)

    model, optimizer = both(tmp_path / "a")

    def step(number: int) -> None:
        sum(part(batch_of(number)).square().mean() for part in model).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(6):
        step(number)
    hb.save(tmp_path / "whole", model, optimizer, step=6)
    with gated() as gate:
        saving = hb.save(tmp_path / "run", model, optimizer, step=6, blocking=False)
        for number in range(6, 10):
            step(number)
            gate.let(5)
        assert not saving.done()
        gate.open()
        saving.wait()
    numbers = []
    for run in ("run", "whole"):
        other, its_optimizer = both(tmp_path / f"other-{run}")
        hb.load(tmp_path / run, other, its_optimizer)
        numbers.append([everything(part) for part in other])
    assert all(same(*pair) for pair in zip(*numbers, strict=True))


def test_another_collection_in_the_same_tiers_waits(tmp_path: Path) -> None:
    """Rows of all tables are laid out anew for it."""
    group = hb.Group(storage_of("ssd", tmp_path))
    model = hb.EmbeddingCollection([hb.Table("t", 8)], seed=0, group=group)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    for number in range(5):
        model({"t": torch.arange(number, number + 40)})["t"].sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    want = model.rows("t").values
    with gated() as gate:
        saving = hb.save(tmp_path / "run", model, optimizer, step=5, blocking=False)
        other = hb.EmbeddingCollection([hb.Table("u", 16)], seed=0, group=group)
        threading.Timer(0.3, gate.open).start()
        began = time.perf_counter()
        other({"u": torch.arange(9)})
        assert time.perf_counter() - began > 0.2
        saving.wait()
    again = hb.EmbeddingCollection([hb.Table("t", 8)], seed=0)
    hb.load(tmp_path / "run", again)
    assert torch.equal(again.rows("t").values, want)


def test_steps_wait_for_memory(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(9))
    hb.save(tmp_path / "whole", model, optimizer, step=9)
    with gated() as gate:
        saving = hb.save(
            tmp_path / "run", model, optimizer, step=9, blocking=False, snapshot_memory=64
        )
        steps = threading.Thread(target=train, args=(model, optimizer, range(10, 20)))
        steps.start()
        steps.join(0.3)
        assert steps.is_alive()  # rows that it is to change have not been written yet
        while steps.is_alive():
            gate.let(1)
            steps.join(0.01)
        gate.open()
        saving.wait()
    assert saving.waited >= 0.2
    assert same(everything(*loaded(tmp_path / "run")), everything(*loaded(tmp_path / "whole")))


def test_a_forward_that_evicts_waits_for_memory(tmp_path: Path) -> None:
    model, optimizer = made("tight", tmp_path, "Adam", dims=(300, 250))
    train(model, optimizer, range(9))
    hb.save(tmp_path / "whole", model, optimizer, step=9)
    with gated() as gate:
        saving = hb.save(
            tmp_path / "run", model, optimizer, step=9, blocking=False, snapshot_memory=64
        )
        model.embeddings.flush()  # copies none
        assert saving.waited == 0

        def look() -> None:
            for number in range(10, 30):
                model(batch_of(number))

        forwards = threading.Thread(target=look)
        forwards.start()
        forwards.join(0.3)
        assert forwards.is_alive()
        gate.open()
        forwards.join()
        saving.wait()
    assert saving.waited >= 0.2
    of_both = [loaded(tmp_path / run, dims=(300, 250)) for run in ("run", "whole")]
    assert same(*(everything(*one) for one in of_both))


def test_one_after_the_other(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(3))
    with gated() as gate:
        first = hb.save(tmp_path / "run", model, optimizer, step=3, blocking=False)
        again = hb.save(tmp_path / "run", model, optimizer, step=4, blocking=False, skip=True)
        assert again is first and not first.done()
        with pytest.raises(TimeoutError, match="step 3 takes more than 0.1 s"):
            first.wait(0.1)
        threading.Timer(0.3, gate.open).start()
        began = time.perf_counter()
        second = hb.save(tmp_path / "run", model, optimizer, step=5, blocking=False)
        assert first.done() and time.perf_counter() - began > 0.2
        assert hb.save(tmp_path / "run", model, optimizer, step=6).step == 6
        assert second.done() and second.wait().step == 5
    assert [one.step for one in hb.checkpoint.list(tmp_path / "run")] == [3, 5, 6]


@pytest.mark.parametrize(
    "wrong", [{"blocking": 1}, {"skip": "no"}, {"snapshot_memory": "much"}, {"wait": True}]
)
def test_wrong_options(tmp_path: Path, wrong: dict[str, Any]) -> None:
    model, optimizer = made("memory", tmp_path)
    with pytest.raises((hb.HotbedError, TypeError)):
        hb.save(tmp_path / "run", model, optimizer, step=0, **wrong)
    assert not (tmp_path / "run").exists()
    hb.save(tmp_path / "run", model, optimizer, step=0)


def test_states_that_are_to_be_left_out(tmp_path: Path) -> None:
    """Rows that are behind would be brought up to date by steps that come later: they are written at once."""
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(5))
    saving = hb.save(tmp_path / "run", model, step=5, blocking=False, states=False)
    assert saving.done()
    want = model.embeddings.rows("item").values
    other, _ = made("memory", tmp_path, "Adam")
    hb.load(tmp_path / "run", other)
    assert torch.equal(other.embeddings.rows("item").values, want)


def test_more_erased_than_there_are_rows(tmp_path: Path) -> None:
    """Which makes later ones whole, and does not end one that is under way."""
    model = hb.EmbeddingCollection([hb.Table("t", 2)], seed=0)
    model.assign("t", torch.arange(6000), torch.rand(6000, 2))
    hb.save(tmp_path / "run", model, step=0)
    model.assign("t", torch.arange(100), torch.rand(100, 2))
    want = model.rows("t")
    with gated() as gate:
        saving = hb.save(tmp_path / "run", model, step=1, blocking=False, delta=True)
        model.erase("t", torch.arange(5900))
        gate.open()
        assert saving.wait().base is not None
    other = hb.EmbeddingCollection([hb.Table("t", 2)], seed=1)
    hb.load(tmp_path / "run", other)
    found = other.rows("t")
    assert torch.equal(found.ids, want.ids) and torch.equal(found.values, want.values)
