"""Threads of a window, which end with it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hotbed import _core

__all__ = ["BRINGING_UP", "READING", "WORKS", "HasTasks", "started"]

READING, BRINGING_UP = WORKS = "reading", "bringing rows up"


class HasTasks(Protocol):
    """A window.

    Attributes:
        at_work: what threads are doing.
        failure: what a thread died of.
    """

    closed: bool
    at_work: set[str]
    failure: BaseException | None

    def task(self, work: str) -> Callable[[], None] | None:
        """Return what to do next, or None."""


def started(
    window: HasTasks, moved: threading.Condition, works: Sequence[str] = WORKS
) -> list[threading.Thread]:
    """Start a thread for each of some works. `moved` guards the window."""
    threads = [
        threading.Thread(
            target=_work,
            args=(weakref.ref(window), moved, work),
            name=f"hotbed-lookahead: {work}",
            daemon=True,
        )
        for work in works
    ]
    for thread in threads:
        thread.start()
    return threads


def _work(window_ref: weakref.ref[HasTasks], moved: threading.Condition, work: str) -> None:
    threads = torch.get_num_threads()
    if work == BRINGING_UP:
        _core.spin_less(threads)  # or waiting threads take the core that this one needs
    # Asking has set torch's count for this thread, too. A second team of OpenMP threads that works
    # would slow the first down.
    _core.use_one_thread()
    while True:
        window = window_ref()
        if window is None:
            return
        with moved:
            if window.closed:
                return
            task = window.task(work)
            if task is None:
                del window
                moved.wait(1.0)
                continue
            window.at_work.add(work)
        try:
            task()
        except BaseException as error:
            window.failure = error
            return
        finally:
            with moved:
                window.at_work.discard(work)
                moved.notify_all()
