"""One process, as those that share tables with others see themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

__all__ = ["ALONE", "Alone"]

T = TypeVar("T")


class Alone:
    """What `hotbed.dist.ranks.Ranks` does, where there are no others."""

    rank = 0
    size = 1

    def telling(self, kind: str) -> contextlib.AbstractContextManager[Any]:
        """What goes wrong inside, before all do `kind`, is told to the others, who wait for it."""
        return contextlib.nullcontext()

    def listening(self, waits: str = "") -> contextlib.AbstractContextManager[Any]:
        """What torch raises inside where another process is gone, is told as such."""
        return contextlib.nullcontext()

    def tell(self, kind: str, value: Any) -> list[Any]:
        """What each rank says."""
        return [value]

    def working(self, kind: str) -> contextlib.AbstractContextManager[Any]:
        """For a ``with`` statement: all do something for long; it ends when all have done it, or where one
        has failed."""
        return contextlib.nullcontext()

    def heartbeat(self, kind: str, items: Iterable[T]) -> Iterable[T]:
        """Inside of `working`: shows the others now and then that this rank is there."""
        return items

    def ends(self, asked: Callable[[], bool]) -> bool:
        """Whether all end after this step. `asked`: whether this one wants to."""
        return asked()

    def stopped(self, kind: str) -> None:
        """Where something has failed: waits until no rank works on it any more."""


ALONE: Final = Alone()
