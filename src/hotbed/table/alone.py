"""One process, as those that share tables with others see themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

__all__ = ["ALONE", "Alone", "Processes"]

T = TypeVar("T")
_Context = Callable[..., contextlib.AbstractContextManager[object]]


class Processes(Protocol):
    """The processes that share tables: `Alone`, or `hotbed.dist.ranks.Ranks`."""

    rank: int
    size: int

    @property
    def trainers(self) -> int:
        """Return the number of processes that have batches."""

    def reporting(self, kind: str) -> contextlib.AbstractContextManager[object]: ...
    def listening(self, waits: str = "") -> contextlib.AbstractContextManager[object]: ...
    def values_of_all(self, kind: str, value: T) -> list[T]: ...
    def working(self, kind: str) -> contextlib.AbstractContextManager[object]: ...
    def heartbeat(self, kind: str, items: Iterable[T]) -> Iterable[T]: ...
    def ends(self, asked: Callable[[], bool]) -> bool: ...
    def stopped(self, kind: str) -> None: ...


class Alone:
    """One process without peers: the `Processes` of a table that is not shared."""

    rank = 0
    size = 1
    trainers = 1

    # As on ranks, for ``with`` statements; alone there is nobody to tell, or to hear of.
    reporting: _Context = staticmethod(contextlib.nullcontext)
    """Broadcast errors raised inside, before all ranks do something, to the others, which wait for it."""
    listening: _Context = staticmethod(contextlib.nullcontext)
    """Turn what torch raises inside where a peer exited into `PeerError`."""
    working: _Context = staticmethod(contextlib.nullcontext)
    """All do something for long; it ends when all have done it, or where one has failed."""

    def values_of_all(self, kind: str, value: T) -> list[T]:
        """Return the value that each rank gives."""
        return [value]

    def heartbeat(self, kind: str, items: Iterable[T]) -> Iterable[T]:
        """Inside of `working`: shows the others now and then that this rank is there."""
        return items

    def ends(self, asked: Callable[[], bool]) -> bool:
        """Whether all end after this step. `asked`: whether this one wants to."""
        return asked()

    def stopped(self, kind: str) -> None:
        """Where something has failed: waits until no rank works on it any more."""


ALONE: Final = Alone()
