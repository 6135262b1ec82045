"""All live tables of this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

__all__ = ["live_tables", "register"]

_tables: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def register(table: Any) -> None:
    """Add a `hotbed.table.live.LiveTable`, which is not kept alive by it."""
    with _lock:
        _tables.add(table)


def live_tables() -> Iterable[Any]:
    """Return all that there are."""
    with _lock:
        return list(_tables)
