"""Processes beside a server, which are begun again when they die, and end with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

__all__ = ["kept_running"]

AGAIN = 1.0
"""Seconds between two beginnings of one that dies."""
LOOK = 0.1
"""Seconds between two looks at it."""


@contextlib.contextmanager
def kept_running(work: Callable[..., None], *args: object) -> Iterator[None]:
    """For a ``with`` statement: another process does ``work(*args)`` meanwhile, which does not return of
    itself. Where it dies it is begun again; it is told to end (SIGTERM) at the end, and when this process has
    gone."""
    ended = threading.Event()
    thread = threading.Thread(target=_keep, args=(work, args, ended), name="hotbed-keeps")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _keep(work: Callable[..., None], args: Sequence[object], ended: threading.Event) -> None:
    context = multiprocessing.get_context("spawn")
    while not ended.is_set():
        process = context.Process(target=_work, args=(os.getpid(), work, args), daemon=True)
        process.start()
        while process.is_alive() and not ended.wait(LOOK):
            pass
        process.terminate()
        process.join()
        ended.wait(AGAIN)


def _work(parent: int, work: Callable[..., None], args: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the parent says when it ends
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    work(*args)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        threading.Event().wait(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
