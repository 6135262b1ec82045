"""Requests that are answered at once: each gets its own answer, and too many are told to come again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.serve.http.batching import QUICK, Batcher, _Seconds
from hotbed.serve.http.errors import RequestError
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.metrics import Metrics
from hotbed.serve.http.parts import Input, Part, inputs_of_bundle
from hotbed.serve.http.rows import Rows

METRICS = Metrics()


class Multiplying:
    """Stands for a served model: answers a multiple of what it is asked with, when it may."""

    def __init__(self, times: int = 2) -> None:
        self.times = times
        about: Any = {
            "name": "x",
            "kind": "numbers",
            "dtype": "float32",
            "shape": [],
            "dense": True,
        }
        bundle: Any = {"inputs": [about], "lookups": [], "tables": {}}
        self.inputs: dict[str, Input] = inputs_of_bundle(bundle, Limits())
        self.may = threading.Event()
        self.may.set()
        self.batches: list[list[float]] = []
        self.threads: list[str] = []

    def answers(self, asked: Mapping[str, Part], tables: object) -> dict[str, np.ndarray]:
        assert self.may.wait(30)
        self.threads.append(threading.current_thread().name)
        values = asked["x"].values
        self.batches.append(values.tolist())
        if 13 in values:
            raise ValueError("13")
        return {"y": self.times * values}


class Nowhere(Rows):
    """Stands for where rows are, of a model that has none."""

    async def tables(self, model: object, asked: object) -> dict[str, Any]:
        return {}

    async def close(self) -> None: ...


def part(*values: float) -> dict[str, Part]:
    return {"x": Part(np.array(values, np.float32))}


async def ask(batcher: Batcher, model: Multiplying, *values: float) -> list[float]:
    answers = await batcher.answers(model, part(*values), len(values))
    return [float(each) for each in answers["y"]]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(20, 99), min_size=1, max_size=5), min_size=1, max_size=30),
    st.integers(1, 12),
)
def test_each_request_has_its_own_answer(requests: list[list[int]], most: int) -> None:
    models = [Multiplying(2), Multiplying(3)]

    async def run() -> list[list[float]]:
        batcher = Batcher(Nowhere(), Limits(batch=most), METRICS)
        asked = [ask(batcher, models[n % 7 == 3], *each) for n, each in enumerate(requests)]
        return await asyncio.gather(*asked)

    assert asyncio.run(run()) == [
        [models[n % 7 == 3].times * each for each in values] for n, values in enumerate(requests)
    ]
    for model in models:
        for batch in model.batches:
            assert len(batch) <= max(most, 5)


def test_those_that_come_meanwhile_are_answered_at_once() -> None:
    async def run() -> None:
        model, batcher = Multiplying(), Batcher(Nowhere(), Limits(), METRICS)
        model.may.clear()
        tasks = [asyncio.create_task(ask(batcher, model, n)) for n in range(9)]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(ask(batcher, model, n)) for n in range(20, 25)]
        await asyncio.sleep(0)
        tasks[10].cancel()
        model.may.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done.pop(10), asyncio.CancelledError)
        assert done == [[2.0 * n] for n in (*range(9), 20, 22, 23, 24)]
        assert sorted(sum(model.batches, [])) == [*range(9), 20, 22, 23, 24]
        assert len(model.batches) <= 3

    asyncio.run(run())


def test_what_takes_long_is_answered_in_a_thread() -> None:
    """What is quick is answered in the event loop: others are read while what is not, or unknown, is."""

    async def run() -> None:
        model, batcher = Multiplying(), Batcher(Nowhere(), Limits(), METRICS)
        for takes, samples in ((QUICK / 2, 1), (0, 1), (0, 40), (2 * QUICK, 1), (0, 1)):
            assert await ask(batcher, model, *[1] * samples) == [2.0] * samples
            batcher._seconds = _Seconds()
            batcher._seconds.measured(1, takes)
        here = threading.current_thread().name
        assert [thread == here for thread in model.threads] == [False, True, False, True, False]

    asyncio.run(run())


def test_a_rare_request_is_answered_at_once_and_others_together() -> None:
    class Here(Nowhere):
        are_here = True

    async def run() -> None:
        model, batcher = Multiplying(), Batcher(Here(), Limits(), METRICS)
        batcher._seconds.measured(1, 0.0)
        tasks = [asyncio.create_task(ask(batcher, model, n)) for n in range(9)]
        assert await asyncio.gather(*tasks) == [[2.0 * n] for n in range(9)]
        assert model.batches == [[0], [*range(1, 9)]]
        batcher._ended = 0.0
        with pytest.raises(ValueError, match="13"):
            await ask(batcher, model, 13)
        assert await ask(batcher, model, 1) == [2.0]
        assert not batcher._waiting and not batcher._samples

    asyncio.run(run())


def test_an_error_reaches_those_that_were_answered_with_it() -> None:
    async def run() -> None:
        model, batcher = Multiplying(), Batcher(Nowhere(), Limits(batch=1), METRICS)
        tasks = [asyncio.create_task(ask(batcher, model, n)) for n in (12, 13, 14)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert done[0] == [24.0] and isinstance(done[1], ValueError) and done[2] == [28.0]
        assert await ask(batcher, model, 1) == [2.0]

    asyncio.run(run())


def test_more_than_can_be_done_in_time_is_refused() -> None:
    async def run() -> None:
        limits = Limits(waiting=0.15, batch=1, seconds=5.0)
        model, batcher = Multiplying(), Batcher(Nowhere(), limits, METRICS)
        model.may.clear()
        first = asyncio.create_task(ask(batcher, model, 1))  # takes a tenth of a second
        await asyncio.sleep(0.1)
        model.may.set()
        await first
        model.may.clear()
        running = [asyncio.create_task(ask(batcher, model, n)) for n in (2, 3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="Come again") as refused:
            await ask(batcher, model, 4)
        assert refused.value.status == 503 and refused.value.retry_after == 1
        model.may.set()
        assert await asyncio.gather(*running) == [[4.0], [6.0]]

    asyncio.run(run())


def test_small_requests_are_not_refused_for_a_large_one() -> None:
    """A batch of many samples does not take as much longer as it has more."""
    seconds = _Seconds()
    assert seconds.of(3, 9) == 0
    for _ in range(20):
        seconds.measured(1, 0.001)
    assert seconds.of(1, 2000) == pytest.approx(0.001) and seconds.of(4, 4) == pytest.approx(0.004)
    for samples in (1, 3, 1000, 2000, 5):
        seconds.measured(samples, 0.001 + samples * 1e-5)
    assert seconds.of(1, 4000) == pytest.approx(0.041, rel=0.01)
    assert seconds.of(4, 4000) == pytest.approx(0.044, rel=0.01)


def test_one_that_has_waited_too_long_is_refused_without_being_asked() -> None:
    async def run() -> None:
        model, batcher = (
            Multiplying(),
            Batcher(Nowhere(), Limits(batch=1, seconds=0.5, waiting=60), METRICS),
        )
        model.may.clear()
        tasks = [asyncio.create_task(ask(batcher, model, n)) for n in (1, 2)]
        await asyncio.sleep(0.7)
        model.may.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert done[0] == [2.0] and isinstance(done[1], RequestError)
        assert model.batches == [[1.0]]
        assert METRICS.waiting._value.get() == 0
        assert await ask(batcher, model, 5) == [10.0]

    asyncio.run(run())
