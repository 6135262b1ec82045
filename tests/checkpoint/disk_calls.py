"""Something happens at a certain call of the file system."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

CALLS = (
    *("open", "write", "ftruncate", "fsync", "close"),
    *("replace", "unlink", "mkdir", "rmdir", "listdir"),
)


@contextlib.contextmanager
def at_call(
    number: int, act: Callable[[], Any], *, then_too: bool = False, calls: tuple[str, ...] = CALLS
) -> Iterator[list[str]]:
    """For a ``with`` statement: `act` is called before the call of that number, from 1, and, if
    `then_too`, before all that come after it; of a write there half of the bytes are written before.

    Yields the names of all calls so far.
    """
    seen: list[str] = []
    alone = threading.Lock()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with alone:
                seen.append(name)
                own = len(seen)
            if own == number or (then_too and own > number):
                if name == "write":
                    with contextlib.suppress(OSError):  # past the cache whole pages alone
                        function(args[0], bytes(args[1])[: len(args[1]) // 2])
                elif name == "close":
                    function(*args)  # it is closed whatever close says
                act()
                if name == "close":
                    return None
            return function(*args, **options)

        return call

    with mock.patch.multiple(os, **{name: counted(name, getattr(os, name)) for name in calls}):
        yield seen


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(error: int) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise OSError(error, os.strerror(error))

    return fail


FULL, BROKEN = failing(errno.ENOSPC), failing(errno.EIO)
