"""How long training waited for rows, and which batches were ahead of it."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
from resolve.tiered_models import NARROW, Model, adagrad, batches, step, storage

import hotbed as hb
from hotbed.ahead import window as window_module
from hotbed.ahead.window import Window

COUNT = 6


def test_a_batch_for_which_the_loop_waits_is_not_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Window._admit

    def late(self: Window, entry: Any, number: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._asked or self.closed)
        admit(self, entry, number)

    monkeypatch.setattr(Window, "_admit", late)
    model = Model(storage(NARROW))
    optimizer = adagrad(model)
    waited = [0.0]
    for batch in hb.lookahead(batches(COUNT), model, depth=1):
        waited.append(model.embeddings.stats()["wait_ms"])
        assert waited[-1] > waited[-2]
        step(model, optimizer, batch)
    stats = model.embeddings.stats()
    assert stats["batches"] == COUNT
    assert stats["batches_ahead"] == stats["batches_unprepared"] == 0
    assert stats["wait_ms"] == waited[-1] and "stall_ms" not in stats


def test_batches_that_are_ready_are_ahead_and_nobody_waits() -> None:
    model = Model(storage(NARROW))
    optimizer = adagrad(model)
    ahead = iter(hb.lookahead(batches(COUNT), model))
    step(model, optimizer, next(ahead))
    first = model.embeddings.stats()
    window: Any = model.embeddings.group.tiers._window()
    for _ in range(COUNT - 1):
        with window._moved:
            assert window._moved.wait_for(window._ready, 60)
        step(model, optimizer, next(ahead))
    assert next(ahead, None) is None
    stats = model.embeddings.stats()
    assert stats["batches_ahead"] - first["batches_ahead"] == COUNT - 1
    assert stats["wait_ms"] == first["wait_ms"] and stats["batches_unprepared"] == 0


def test_what_a_forward_waits_counts_too() -> None:
    model = Model(storage(NARROW))
    optimizer = adagrad(model)
    for batch in batches(COUNT):
        before = model.embeddings.stats()["wait_ms"]
        step(model, optimizer, batch)
        assert model.embeddings.stats()["wait_ms"] > before
    stats = model.embeddings.stats()
    assert stats["batches_unprepared"] == COUNT and stats["batches_ahead"] == 0


def test_a_slow_loader_is_not_waited_for_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the loader moves: a thousand seconds a batch."""
    clock = itertools.count(0)
    now = [next(clock)]

    def slow() -> Iterator[Any]:
        for batch in batches(COUNT):
            now[0] = 1000 * next(clock)
            yield batch

    fake = types.SimpleNamespace(perf_counter=lambda: float(now[0]), monotonic=time.monotonic)
    monkeypatch.setattr(window_module, "time", fake)
    model = Model(storage(NARROW))
    optimizer = adagrad(model)
    for batch in hb.lookahead(slow(), model, depth=1, horizon=1):
        step(model, optimizer, batch)
    assert model.embeddings.stats()["wait_ms"] < 1_000_000
