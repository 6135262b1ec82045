"""A process beside a server, which makes versions of the checkpoints of a run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator

from hotbed.serve.following import Follower, follow

__all__ = ["following"]

AGAIN = 1.0
"""Seconds after which one that has died is begun again."""


@contextlib.contextmanager
def following(bundle: str, run: str) -> Iterator[None]:
    """For a ``with`` statement: versions of a bundle are made meanwhile, in another process.

    Raises:
        BundleError, CheckpointError: as of `hotbed.serve.following.Follower`.
    """
    with Follower(bundle, run):
        pass  # what is wrong is told before anything is served
    ended = threading.Event()
    thread = threading.Thread(target=_kept, args=(bundle, run, ended), name="hotbed-follows")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _kept(bundle: str, run: str, ended: threading.Event) -> None:
    """Have a process follow, and another one where it dies, until `ended`."""
    context = multiprocessing.get_context("spawn")
    while not ended.is_set():
        process = context.Process(target=_follow, args=(bundle, run, os.getpid()), daemon=True)
        process.start()
        while process.is_alive() and not ended.wait(0.2):
            pass
        process.terminate()
        process.join()
        ended.wait(AGAIN)


def _follow(bundle: str, run: str, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the parent says when it ends
    stop = threading.Event()
    threading.Thread(target=_ends_with, args=(parent, stop), daemon=True).start()
    follow(bundle, run, stop=stop, report=lambda line: print(line, file=sys.stderr, flush=True))


def _ends_with(parent: int, stop: threading.Event) -> None:
    """Set `stop` when the parent is gone."""
    while os.getppid() == parent:
        if stop.wait(1.0):
            return
    stop.set()
