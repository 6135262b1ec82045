"""What all attacks share: rounds by seed, and actors at once that must come to an end.

`make test` runs a few fixed seeds of each attack. `make soak` (HOTBED_SOAK=1) draws new ones for ten
minutes in all (HOTBED_ATTACK_SECONDS), of which each attack names its share; hostile checkpoints take as
long by themselves. HOTBED_ATTACK_SEED=N repeats the round of one seed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from effort import SOAK

SECONDS = float(os.environ.get("HOTBED_ATTACK_SECONDS", "600"))
PATIENCE = float(os.environ.get("HOTBED_ATTACK_PATIENCE", "120"))
"""Seconds after which whoever still works is taken to hang."""


def seeds(share: float, usual: int) -> Iterator[int]:
    """`usual` seeds; under `make soak` new ones for `share` of the time.

    Whoever crashes leaves its seed as the last line on the terminal under `make soak`.
    """
    if (given := os.environ.get("HOTBED_ATTACK_SEED")) is not None:
        yield int(given)
        return
    if not SOAK:
        yield from range(usual)
        return
    ends = time.monotonic() + share * SECONDS
    while time.monotonic() < ends:
        yield int.from_bytes(os.urandom(4), "little")


@contextlib.contextmanager
def attack(seed: int) -> Iterator[random.Random]:
    """One round: its source of chance. Names the seed of whatever it raises. Threads take turns all
    the time in half of the rounds."""
    chance = random.Random(seed)
    before = sys.getswitchinterval()
    if chance.random() < 0.5:
        sys.setswitchinterval(1e-6)
    _say(seed)
    try:
        yield chance
    except BaseException as error:
        if isinstance(error, (AssertionError, Exception)):
            raise AssertionError(f"HOTBED_ATTACK_SEED={seed}: {error!r}") from error
        raise
    finally:
        sys.setswitchinterval(before)


def _say(seed: int) -> None:
    """For the case that this process does not live to say it."""
    if SOAK:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\r\x1b[K{test} HOTBED_ATTACK_SEED={seed} ")


class Together:
    """Actors on threads of their own, all at once.

    >>> with Together() as actors:
    ...     actors.act(trainer)
    ...     actors.until_then(reader)    # again and again while somebody acts
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        """Set when those who act are done, or somebody failed."""
        self._failed: list[BaseException] = []
        self._acting: list[threading.Thread] = []
        self._meanwhile: list[threading.Thread] = []

    def act(self, what: Callable[[], Any]) -> None:
        self._acting.append(threading.Thread(target=self._run, args=(what, False), daemon=True))

    def until_then(self, what: Callable[[], Any]) -> None:
        """At least once."""
        self._meanwhile.append(threading.Thread(target=self._run, args=(what, True), daemon=True))

    def _run(self, what: Callable[[], Any], again: bool) -> None:
        try:
            what()
            while again and not self.over.is_set():
                what()
        except BaseException as error:
            self._failed.append(error)
            self.over.set()

    def __enter__(self) -> Together:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            return
        ends = time.monotonic() + PATIENCE
        for thread in (*self._meanwhile, *self._acting):
            thread.start()
        for thread in self._acting:
            self._join(thread, ends)
        self.over.set()
        for thread in self._meanwhile:
            self._join(thread, ends)
        if self._failed:
            raise self._failed[0]

    def _join(self, thread: threading.Thread, ends: float) -> None:
        thread.join(max(0.0, ends - time.monotonic()))
        if thread.is_alive():
            if self._failed:  # the others may wait for who failed
                raise self._failed[0]
            pytest.fail(f"HANGS:\n{stacks()}", pytrace=False)


def stacks() -> str:
    """Where every thread is."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def in_forked_child(what: Callable[[], Any]) -> None:
    """Runs it in a forked child.

    Raises:
        AssertionError: it raised there, crashed, or hung (and was killed).
    """
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            faulthandler.dump_traceback_later(PATIENCE / 2, file=tell, exit=True)
            what()
            os._exit(0)
        except BaseException as error:
            os.write(tell, repr(error).encode())
        finally:
            os._exit(1)
    os.close(tell)
    with open(told, "rb") as file:
        ended = os.pidfd_open(child)
        try:
            if not select.select([ended], [], [], PATIENCE)[0]:
                os.kill(child, signal.SIGKILL)
        finally:
            os.close(ended)
        _, status = os.waitpid(child, 0)
        said = file.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"a forked child ended with {code}: {said}"
