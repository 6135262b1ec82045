"""Logs of small segments, so that a short training fills, empties and removes many; and faults for them."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hotbed import _core

SEGMENT_BYTES = 64 * 4096
"""The smallest."""


@contextmanager
def small_logs(
    faults: _core.IoFaults | None = None, segment_bytes: int = SEGMENT_BYTES
) -> Iterator[None]:
    """Collections that are made meanwhile have such logs."""
    make = functools.partial(_core.Storage.make, segment_bytes=segment_bytes, observer=faults)
    with mock.patch.object(_core, "Storage", types.SimpleNamespace(make=make)):
        yield


def in_memory() -> str | None:
    """A folder in memory, where there is one: what tests write there is not to last."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
