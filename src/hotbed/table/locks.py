"""Who may touch the rows of tables: any number of threads that read, or one that writes.

A lookup holds its tables while it reads, so it sees the rows of one step; a step, an assignment or
a move has them alone. A thread that has rows to itself may take them again, one that reads them must
not write: whoever calls for `alone` comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from hotbed import _core

__all__ = ["alone", "reading", "together"]


def alone(tables: Iterable[Any]) -> _core.Hold:
    """For a ``with`` statement: nobody else reads or writes rows of these live tables."""
    return _core.Hold([table.core for table in tables], True)


def together(tables: Iterable[Any]) -> _core.Hold:
    """For a ``with`` statement: nobody writes rows of these live tables."""
    return _core.Hold([table.core for table in tables], False)


@contextlib.contextmanager
def reading(tables: Iterable[Any]) -> Iterator[None]:
    """As `together`, of tables that are ready to be read: they have taken over weights that were put in
    place of a handle's, and have their place in the tiers."""
    tables = list(tables)
    while True:
        for table in tables:
            table.ready()
        with together(tables):
            if not any(
                table.core.unallocated for table in tables
            ):  # an optimizer was made just now
                yield
                return
