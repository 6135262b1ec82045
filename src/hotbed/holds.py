"""Who may touch the rows of tables: any number of threads that read, or one that writes.

A lookup holds its tables while it reads, so it sees the rows of one step; a step, an assignment or
a move has them alone. A thread that has rows to itself may take them again, one that reads them must
not write: whoever calls for `alone` comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hotbed import _core

__all__ = ["alone", "together"]


def alone(tables: Iterable[Any]) -> _core.Hold:
    """For a ``with`` statement: nobody else reads or writes rows of these live tables."""
    return _core.Hold([table.core for table in tables], True)


def together(tables: Iterable[Any]) -> _core.Hold:
    """For a ``with`` statement: nobody writes rows of these live tables."""
    return _core.Hold([table.core for table in tables], False)
