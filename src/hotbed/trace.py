"""A trace of what ran when, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hotbed.files import appearing
from hotbed.paths import path_text

__all__ = ["Trace", "span"]

_untraced: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

span = _untraced
"""Names what runs inside a ``with`` statement, where a trace is being taken. To be called as ``trace.span``:
a trace puts another one in its place."""


class Trace:
    """Collects spans while it is entered; one at a time in a process.

    >>> with Trace() as trace:
    ...     train()
    >>> trace.write("trace.json"); trace.totals()["step"]

    Threading: spans may come from any thread.
    """

    MOST_EVENTS = 2_000_000
    """Later spans are only counted."""

    def __init__(self) -> None:
        self._began = time.perf_counter_ns()
        self._events: list[tuple[str, int, int, int]] = []
        self._threads: dict[int, str] = {}
        self.left_out = 0

    def __enter__(self) -> Trace:
        global span
        if span is not _untraced:
            raise RuntimeError("Another trace is being taken.")
        span = functools.partial(_Span, self)
        return self

    def __exit__(self, *error: object) -> None:
        global span
        span = _untraced

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        """One span of the calling thread, in ``time.perf_counter_ns``."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        if len(self._events) < self.MOST_EVENTS:
            self._events.append((name, thread, start_ns, end_ns - start_ns))
        else:
            self.left_out += 1

    def totals(self) -> dict[str, tuple[int, float]]:
        """Name → how many spans there were, and their milliseconds together."""
        found: dict[str, tuple[int, float]] = {}
        for name, _, _, duration in self._events:
            count, total = found.get(name, (0, 0.0))
            found[name] = count + 1, total + duration / 1e6
        return found

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON array format of Chrome's trace viewer, which Perfetto reads.

        Raises:
            OSError: it cannot be written; what was at `path` is there.
        """
        process = os.getpid()
        order = {thread: number for number, thread in enumerate(self._threads)}
        events: list[dict[str, object]] = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": process,
                "tid": order[thread],
                "args": {"name": "training" if name == "MainThread" else name},
            }
            for thread, name in self._threads.items()
        ]
        events += [
            {
                "name": name,
                "ph": "X",
                "pid": process,
                "tid": order[thread],
                "ts": (start - self._began) / 1e3,
                "dur": duration / 1e3,
            }
            for name, thread, start, duration in self._events
        ]
        with appearing(path_text(path)) as part:
            Path(part).write_text(json.dumps(events))


class _Span:
    """For one ``with`` statement."""

    __slots__ = "_name", "_start", "_trace"

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._trace.add(self._name, self._start, time.perf_counter_ns())
