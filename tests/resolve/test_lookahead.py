"""`lookahead`: the loader's own batches, in order, whatever becomes of the loop, and nothing left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from resolve.tiered_models import (
    NARROW,
    Model,
    Once,
    adagrad,
    assert_same_rows,
    batches,
    expected,
    lookahead_threads,
    pinned,
    prepared,
    step,
    storage,
)

import hotbed as hb
from hotbed.ahead.window import BRINGING_UP, READING, _windows
from hotbed.errors import TableError

# -- the batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "horizon"), [(0, 0), (1, 0), (2, 32), (8, 3), (3, 100)])
def test_the_same_batches_in_the_same_order_twice(depth: int, horizon: int) -> None:
    data = batches(12)
    model = Model(storage())
    ahead = hb.lookahead(data, model, depth, horizon)
    assert len(ahead) == 12
    optimizer = adagrad(model)
    losses = []
    for _ in range(2):
        for at, batch in enumerate(ahead):
            assert batch is data[at]
            losses.append(step(model, optimizer, batch))
    assert losses == expected(data + data)
    stats = model.embeddings.stats()
    assert stats["batches"] == 24 and stats["rows_evicted"] == 0
    assert prepared(stats) == (24 if depth else 0)


@pytest.mark.parametrize(("depth", "horizon"), [(1, 1), (2, 5), (4, 4), (3, 8), (3, 1)])
def test_as_many_batches_are_ahead_as_asked_for(depth: int, horizon: int) -> None:
    """What the threads have done when they have nothing to do: `horizon` batches beside that of the loop,
    and at least `depth`, are announced, and the rows of `depth` are in their slots."""
    known = max(depth, horizon)
    loader = Once(batches(20))
    model = Model(storage())
    optimizer = adagrad(model)
    ahead = iter(hb.lookahead(loader, model, depth, horizon))
    for taken in range(1, 4):
        step(model, optimizer, next(ahead))
        assert _ready_when_idle(model) == [at < depth for at in range(known)]
        assert loader.read == taken + known
    ahead.close()  # type: ignore[attr-defined]


def test_a_budget_that_is_short_says_how_many_batches_it_holds() -> None:
    model = Model(storage(NARROW))
    optimizer = adagrad(model)
    ahead = iter(hb.lookahead(batches(20, size=120), model, depth=8, horizon=8))
    first = next(ahead)
    ready = _ready_when_idle(model)
    holds = sum(ready)
    assert 1 < holds < 8 and ready == [True] * holds + [False] * (8 - holds)
    step(model, optimizer, first)
    # It may be tried before or after the next batch is taken away.
    told = f"holds ({holds - 1}|{holds}) batches beside the one that is trained on"
    with pytest.warns(UserWarning, match=told):
        next(ahead)
        _ready_when_idle(model)
        next(ahead)
    ahead.close()  # type: ignore[attr-defined]


def _ready_when_idle(model: Model) -> list[bool]:
    """Of the batches ahead, once the threads have nothing to do, whether their rows are in slots."""
    (window,) = (w for w in _windows if model.embeddings in w._modules.values())

    def is_idle() -> bool:
        return not window.at_work and not any(map(window.task, (READING, BRINGING_UP)))

    with window._moved:
        assert window._moved.wait_for(is_idle, timeout=60)
        return [entry.admitted for entry in window._entries]


@pytest.mark.parametrize("count", [-1, 2.0, True, "2", torch.tensor(1.5)])
@pytest.mark.parametrize("name", ["depth", "horizon"])
def test_depths_that_are_no_counts_are_refused(name: str, count: Any) -> None:
    ahead = hb.lookahead([], Model())
    with pytest.raises(TableError, match=f"{name} must be a count of batches"):
        hb.lookahead([], Model(), **{name: count})
    with pytest.raises(TableError, match=f"{name} must be a count of batches"):
        setattr(ahead, name, count)


@pytest.mark.parametrize("count", [1_000_001, 2**63, 2**70, pytest.param(1 << 20_000, id="long")])
@pytest.mark.parametrize("name", ["depth", "horizon"])
def test_depths_beyond_counting_are_refused(name: str, count: int) -> None:
    with pytest.raises(TableError, match=f"{name} must be at most 1,000,000 batches"):
        hb.lookahead([], Model(), **{name: count})
    assert len(list(hb.lookahead(batches(3), Model(storage()), **{name: 1_000_000}))) == 3


@pytest.mark.parametrize("change", [{"depth": 0}, {"horizon": 0}, {"depth": 8}, {"inputs": None}])
def test_a_loop_goes_on_with_the_settings_that_it_began_with(change: dict[str, Any]) -> None:
    data = batches(12)
    model = Model(storage())
    optimizer = adagrad(model)
    ahead = hb.lookahead(
        data, model, 2, 5, inputs=lambda batch: {n: batch[n] for n in ("item", "user")}
    )
    losses = []
    for at, batch in enumerate(ahead):
        if at == 3:
            for name, value in change.items():
                setattr(ahead, name, value)
        losses.append(step(model, optimizer, batch))
    assert losses == expected(data)
    assert prepared(model.embeddings.stats()) == 12
    list(ahead)
    assert prepared(model.embeddings.stats()) == 12


def test_what_cannot_look_ahead_is_refused() -> None:
    model = Model(storage())
    with pytest.raises(TableError, match=r"one module that holds them all.*nn\.ModuleList"):
        hb.lookahead(hb.lookahead([], model), model)
    with pytest.raises(TableError, match=r"must be a torch\.nn\.Module, got list"):
        hb.lookahead([], [model])
    with pytest.raises(TableError, match=r"inputs must be a function .* got str"):
        hb.lookahead([], model, inputs="features")


def test_after_a_break_a_list_starts_again() -> None:
    data = batches(9)
    model = Model(storage())
    ahead = hb.lookahead(data, model)
    for stop in (4, 0, 9):
        for at, batch in enumerate(ahead):
            assert batch is data[at]
            if at == stop:
                break
        assert pinned(model) == 0


def test_after_a_break_an_iterator_goes_on() -> None:
    data = batches(30)
    loader = Once(data)
    model = Model(storage())
    optimizer = adagrad(model)
    ahead = hb.lookahead(loader, model, depth=2, horizon=5)
    losses: list[float] = []
    for part in (1, 1, 7, 100):
        for taken, batch in enumerate(ahead, 1):
            losses.append(step(model, optimizer, batch))
            if taken == part:
                break
    assert losses == expected(data)
    assert list(ahead) == []


def test_an_error_of_the_loader_comes_at_its_turn() -> None:
    data = batches(12)

    class Failing(Once):
        def __next__(self) -> Any:
            batch = super().__next__()
            if self.read == 6:
                raise RuntimeError("the sixth")
            return batch

    for horizon in (2, 4, 32):
        model = Model(storage())
        ahead = hb.lookahead(Failing(data), model, depth=2, horizon=horizon)
        seen: list[Any] = []
        with pytest.raises(RuntimeError, match="the sixth"):
            for batch in ahead:
                seen.append(batch)
                if len(seen) == 3:
                    break
            seen.extend(ahead)  # what was fetched before the break, then the error
        assert all(a is b for a, b in zip(seen, data[:5], strict=True))
        # A loader that can go on does.
        assert all(a is b for a, b in zip(ahead, data[6:], strict=True))
        assert pinned(model) == 0


@pytest.mark.parametrize("place", ["model", "loop"])
def test_an_error_elsewhere_leaves_nothing(place: str) -> None:
    data = batches(12)
    model = Model(storage())
    optimizer = adagrad(model)

    def loop() -> None:
        for at, batch in enumerate(hb.lookahead(data, model, depth=4)):
            if at == 3 and place == "model":
                model.forward = None
            loss = model(batch)
            if at == 3:
                raise KeyError("loop")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(TypeError if place == "model" else KeyError):
        loop()
    assert lookahead_threads() == [] and pinned(model) == 0


@pytest.mark.parametrize("way", ["close", "del", "cycle"])
def test_a_loop_that_is_given_up_leaves_nothing(way: str) -> None:
    model = Model(storage())
    iterator = iter(hb.lookahead(batches(12), model, depth=3))
    next(iterator)
    if way == "close":
        iterator.close()  # type: ignore[attr-defined]
    elif way == "cycle":
        cycle: list[Any] = [iterator]
        cycle.append(cycle)
        del cycle
    del iterator
    gc.collect()
    assert lookahead_threads() == [] and pinned(model) == 0


def test_garbage_that_the_thread_collects() -> None:
    """A loop in a cycle may be collected anywhere, in its own thread too."""
    model = Model(storage())

    abandoned = threading.Event()

    class Collecting(Once):
        def __next__(self) -> Any:
            if self.read == 2:  # while the first batch is out
                abandoned.wait(60)
                gc.collect()
            return super().__next__()

    loader = Collecting(batches(12))
    iterator = iter(hb.lookahead(loader, model, depth=1, horizon=2))
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    gone = weakref.ref(iterator)
    gc.disable()
    try:
        del iterator, cycle
        abandoned.set()
        for thread in lookahead_threads():
            thread.join()
    finally:
        gc.enable()
    assert gone() is None
    model.embeddings.group.tiers.release_spent()  # as the next forward or step does
    assert pinned(model) == 0


# -- several of them ---------------------------------------------------------------------------------


# Whether two windows are both deep at a time, for which there is no room, is up to the clock.
@pytest.mark.filterwarnings("ignore:The budget holds")
def test_one_after_the_other_inside_and_beside_each_other() -> None:
    data, other = batches(6), batches(4, seed=1)
    plain, model = Model(), Model(storage(60_000))
    optimizers = adagrad(plain), adagrad(model)

    def both(batch: Any) -> None:
        assert step(plain, optimizers[0], batch) == step(model, optimizers[1], batch)

    for loader in (data, other):
        for batch in hb.lookahead(loader, model):
            both(batch)
    for batch in hb.lookahead(data, model):
        both(batch)
        for inner in hb.lookahead(other, model):
            both(inner)
    for one, two in zip(hb.lookahead(data, model), hb.lookahead(other, model), strict=False):
        both(one)
        both(two)
    assert_same_rows(model, plain)
    assert pinned(model) == 0


def test_without_tiers_batches_pass_through() -> None:
    loader = Once(batches(5))
    ahead = iter(hb.lookahead(loader, Model()))
    next(ahead)
    assert loader.read == 1 and lookahead_threads() == []
    assert len(list(ahead)) == 4


# -- processes ---------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_interpreter_may_end_in_the_middle() -> None:
    program = """
import itertools, sys
sys.path.insert(0, sys.argv[1])
import tiered_models as t
import hotbed as hb
model = t.Model(t.storage())
iterator = iter(hb.lookahead(itertools.cycle(t.batches(50, size=3000)), model, 8, 64))
print(t.step(model, t.adagrad(model), next(iterator)) != 0)
if len(sys.argv) > 2:
    raise SystemError("uncaught")
"""
    folder = str(Path(__file__).parent)
    for more in ([], ["raise"]):
        done = subprocess.run(
            [sys.executable, "-c", program, folder, *more],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert done.stdout == "True\n"
        assert done.returncode == (1 if more else 0), done.stderr
        assert ("SystemError: uncaught" in done.stderr) == bool(more)
        for wrong in ("terminate", "Fatal", "Exception ignored"):
            assert wrong not in done.stderr


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_let_go() -> None:
    model = Model(storage())
    iterator = iter(hb.lookahead(batches(50), model, depth=8, horizon=32))
    next(iterator)
    child = os.fork()
    if child == 0:
        try:
            iterator.close()  # type: ignore[attr-defined]
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 49
