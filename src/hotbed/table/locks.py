"""Who may touch the rows of tables: any number of threads that read, or one that writes.

A lookup holds its tables while it reads, so it sees the rows of one step; a step, an assignment or
a move has them alone. A thread that has rows to itself may take them again, one that reads them must
not write: whoever calls for `alone` comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from hotbed import _core

__all__ = ["HeldTable", "alone", "reading", "together"]


class HeldTable(Protocol):
    """A live table whose rows can be held."""

    @property
    def core(self) -> _core.Table: ...

    def ready(self) -> None:
        """Do what may change rows before somebody reads them."""


def alone(tables: Iterable[HeldTable]) -> _core.Hold:
    """For a ``with`` statement: nobody else reads or writes rows of these live tables."""
    return _core.Hold([table.core for table in tables], True)


def together(tables: Iterable[HeldTable]) -> _core.Hold:
    """For a ``with`` statement: nobody writes rows of these live tables."""
    return _core.Hold([table.core for table in tables], False)


@contextlib.contextmanager
def reading(tables: Iterable[HeldTable]) -> Iterator[None]:
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
