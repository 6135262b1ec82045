"""Every test of look-ahead and tiers leaves no thread behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiered_models import lookahead_threads


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert lookahead_threads() == []
