"""Requests of several clients, answered at once."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hotbed.serve.http.answering import Answering, Answers
from hotbed.serve.http.errors import busy
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.metrics import Metrics
from hotbed.serve.http.parts import Part
from hotbed.serve.http.rows import Rows

__all__ = ["Batcher"]

REMEMBERED = 0.9
"""Of the weight of batches that were measured before, with each new one."""
QUICK = 1e-3
"""Seconds that an answer may be expected to take in the event loop: a thread would make small ones later."""
RARE = 1e-3
"""Seconds without an answer, after which others are taken not to come at the same time."""
SIMILAR = 4
"""Times as many samples, for which batches tell how long others take."""


class _Waiting:
    """A request that waits for its answer."""

    def __init__(self, model: Answering, asked: Mapping[str, Part], samples: int) -> None:
        self.model, self.asked, self.samples = model, asked, samples
        self.answer: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self.since = time.monotonic()


class _Seconds:
    """How long batches take: a line through those that were measured, of which the latest weigh most. Where
    all were of one size, samples more are taken to cost nothing: that is known when they were answered."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        """Of ones, samples, their squares, seconds, and samples times seconds."""

    def measured(self, samples: int, seconds: float) -> None:
        new = 1.0, samples, samples * samples, seconds, samples * seconds
        self._sums = [REMEMBERED * each + one for each, one in zip(self._sums, new, strict=True)]

    def is_quick(self, samples: int) -> bool:
        """Return whether a batch is known to take little; nothing is of one much larger than most."""
        size = self._sums[1] / self._sums[0] if self._sums[0] else 0.0
        return samples <= SIMILAR * size and self.of(1, samples) <= QUICK

    def of(self, batches: int, samples: int) -> float:
        """Return the seconds of some batches that have so many samples together."""
        if not self._sums[0]:
            return 0.0
        size, square, seconds, product = (each / self._sums[0] for each in self._sums[1:])
        spread = square - size * size
        rise = 0.0
        if spread > 1e-6 * size * size:
            rise = (product - size * seconds) / spread
        rise = min(max(rise, 0.0), seconds / size)
        return batches * (seconds - rise * size) + samples * rise


class Batcher:
    """Answers requests, those that have come meanwhile at once: in a thread beside the event loop, but for
    those that take less than the way to it and back.

    A request waits no longer than the batch before it takes: nothing waits for others to come. Where the
    requests that wait are more work than `Limits.waiting`, new ones are told to come again.
    """

    def __init__(self, rows: Rows, limits: Limits, metrics: Metrics) -> None:
        self._rows = rows
        self._limits, self._metrics = limits, metrics
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._samples = 0
        """Of requests that wait or are being answered."""
        self._seconds = _Seconds()
        self._ended = 0.0
        """When the last batch was answered."""
        self._running: set[asyncio.Task[None] | None] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hotbed-answers")

    async def answers(self, model: Answering, asked: Mapping[str, Part], samples: int) -> Answers:
        """Return the outputs of some samples.

        Raises:
            RequestError: there is too much to do, or they were not answered in time.
        """
        self.check()
        waiting = _Waiting(model, asked, samples)
        self._samples += samples
        self._metrics.waiting.inc(samples)
        if self._is_alone(waiting):
            await self._answer([waiting])  # which does not wait for anything
            return waiting.answer.result()
        self._waiting.append(waiting)
        if len(self._running) < self._rows.at_once:
            self._running.add(asyncio.create_task(self._run()))
        seconds = 2 * self._limits.seconds
        try:
            return await asyncio.wait_for(waiting.answer, seconds)
        except asyncio.TimeoutError:
            raise busy(f"It was not answered in {seconds:g} s. Come again.", seconds) from None

    def _is_alone(self, waiting: _Waiting) -> bool:
        """Return whether a request is answered at once, as no other is likely to come meanwhile."""
        return (
            waiting.since - self._ended > RARE
            and not self._running
            and self._rows.are_here
            and self._seconds.is_quick(waiting.samples)
        )

    def check(self) -> None:
        """Raise RequestError where there is too much to do: before a body is read, too."""
        batches = -(-self._samples // self._limits.batch)
        ahead = self._seconds.of(batches, self._samples) / self._rows.at_once
        if ahead > self._limits.waiting:
            raise busy(f"Requests before this one take {ahead:.1f} s. Come again.", ahead)

    async def _run(self) -> None:
        try:
            while batch := self._taken():
                await self._answer(batch)
        finally:
            self._running.discard(asyncio.current_task())

    async def _answer(self, batch: Sequence[_Waiting]) -> None:
        samples, begun = sum(each.samples for each in batch), time.monotonic()
        model, asked = batch[0].model, _joined(batch)
        try:
            tables = await self._rows.tables(model, asked)
            if self._seconds.is_quick(samples):
                found = model.answers(asked, tables)
            else:
                found = await asyncio.get_running_loop().run_in_executor(
                    self._pool, model.answers, asked, tables
                )
        except Exception as error:  # told to whoever asked
            for each in batch:
                if not each.answer.done():
                    each.answer.set_exception(error)
        else:
            for each, answers in zip(batch, _split(batch, found), strict=True):
                if not each.answer.done():
                    each.answer.set_result(answers)
        self._fewer(samples)
        self._metrics.batch.observe(samples)
        self._ended = time.monotonic()
        self._seconds.measured(samples, self._ended - begun)

    def _taken(self) -> list[_Waiting]:
        """Return requests of one version that are answered at once, in the order in which they came."""
        batch: list[_Waiting] = []
        samples, now = 0, time.monotonic()
        while self._waiting:
            first = self._waiting[0]
            if first.answer.done() or now - first.since > self._limits.seconds:
                self._dropped(self._waiting.popleft())
                continue
            if batch and (
                samples + first.samples > self._limits.batch or first.model is not batch[0].model
            ):
                break
            batch.append(self._waiting.popleft())
            samples += first.samples
        return batch

    def _dropped(self, waiting: _Waiting) -> None:
        self._fewer(waiting.samples)
        if not waiting.answer.done():
            waiting.answer.set_exception(busy("It has waited too long. Come again.", 1))

    def _fewer(self, samples: int) -> None:
        self._samples -= samples
        self._metrics.waiting.dec(samples)


def _joined(batch: Sequence[_Waiting]) -> Mapping[str, Part]:
    """Return the samples of all requests."""
    if len(batch) == 1:
        return batch[0].asked
    return {
        name: each.joined([waiting.asked[name] for waiting in batch])
        for name, each in batch[0].model.inputs.items()
    }


def _split(batch: Sequence[_Waiting], found: Answers) -> list[Answers]:
    """Return the answers of each request."""
    if len(batch) == 1:
        return [found]
    ends = np.cumsum([waiting.samples for waiting in batch])[:-1]
    split = {name: np.split(values, ends) for name, values in found.items()}
    return [{name: values[n] for name, values in split.items()} for n in range(len(batch))]
