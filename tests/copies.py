"""Functions in a process of their own, which is a copy of one that has imported torch and hotbed."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dist.worlds import STARTS


def in_a_copy(function: Callable[..., Any], *arguments: Any, seconds: float = 300) -> Any:
    """What it returns there.

    Raises:
        AssertionError: it raised something, has crashed, or did not end in time.
    """
    own, other = STARTS.Pipe()
    process = STARTS.Process(target=_tell, args=(other, function, *arguments), daemon=True)
    process.start()
    other.close()
    try:
        assert own.poll(seconds), f"it did not end in {seconds} s"
        returned, told = own.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    assert returned, told
    return told


def _tell(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    gc.freeze()  # what the process was begun with
    try:
        told = True, function(*arguments)
    except BaseException:
        told = False, traceback.format_exc()[-4000:]
    pipe.send(told)
