"""Requests of several clients, answered at once."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hotbed.serve.http.errors import busy
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.metrics import Metrics
from hotbed.serve.http.parts import Answering, Answers, Part
from hotbed.serve.http.rows import Rows

__all__ = ["Batcher"]

REMEMBERED = 0.9
"""Of the seconds of a sample, as they were measured before."""


class _Waiting:
    """A request that waits for its answer."""

    def __init__(self, model: Answering, asked: Mapping[str, Part], samples: int) -> None:
        self.model, self.asked, self.samples = model, asked, samples
        self.answer: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self.since = time.monotonic()


class Batcher:
    """Answers requests, those that have come meanwhile at once, in a thread beside the event loop.

    A request waits no longer than the batch before it takes: nothing waits for others to come. Where the
    requests that wait are more work than `Limits.waiting`, new ones are told to come again.
    """

    def __init__(self, rows: Rows, limits: Limits, metrics: Metrics) -> None:
        self._rows = rows
        self._limits, self._metrics = limits, metrics
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._samples = 0
        """Of requests that wait or are being answered."""
        self._seconds = 0.0
        """Of a sample."""
        self._running: set[asyncio.Task[None] | None] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hotbed-answers")

    async def answers(self, model: Answering, asked: Mapping[str, Part], samples: int) -> Answers:
        """Return the outputs of some samples.

        Raises:
            RequestError: there is too much to do.
        """
        ahead = self._samples * self._seconds / self._rows.at_once
        if ahead > self._limits.waiting:
            raise busy(f"Requests before this one take {ahead:.1f} s. Come again.", ahead)
        waiting = _Waiting(model, asked, samples)
        self._waiting.append(waiting)
        self._samples += samples
        self._metrics.waiting.inc(samples)
        if len(self._running) < self._rows.at_once:
            self._running.add(asyncio.create_task(self._run()))
        return await waiting.answer

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
        self._measured((time.monotonic() - begun) / samples, samples)

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

    def _measured(self, seconds: float, samples: int) -> None:
        self._metrics.batch.observe(samples)
        kept = REMEMBERED if self._seconds else 0.0
        self._seconds = kept * self._seconds + (1 - kept) * seconds


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
    ends = np.cumsum([waiting.samples for waiting in batch])[:-1]
    split = {name: np.split(values, ends) for name, values in found.items()}
    return [{name: values[n] for name, values in split.items()} for n in range(len(batch))]
