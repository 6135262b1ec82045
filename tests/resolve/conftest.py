"""Every test of look-ahead and tiers leaves no thread behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from resolve.tiered_models import lookahead_threads


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert lookahead_threads() == []


@pytest.fixture(autouse=True, scope="session")
def switch_interval() -> Iterator[None]:
    """How long a thread may run before another takes its turn, in seconds: HOTBED_SWITCH_INTERVAL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(float(os.environ.get("HOTBED_SWITCH_INTERVAL", before)))
    yield
    sys.setswitchinterval(before)
