"""All live tables of this process that an optimizer may hold."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

__all__ = ["live_tables", "register", "unregister"]

_tables: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def register(table: Any) -> None:
    """Add a `hotbed.table.live.LiveTable`, which is not kept alive by it."""
    with _lock:
        _tables.add(table)


def unregister(table: Any) -> None:
    """Leave out a table that no optimizer holds, as it is a shard of another one."""
    with _lock:
        _tables.discard(table)


def live_tables() -> Iterable[Any]:
    """Return all that there are."""
    with _lock:
        return list(_tables)
