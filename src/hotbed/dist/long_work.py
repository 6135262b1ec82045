"""Work that ranks do together for long, each at its own pace, such as saving."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from hotbed.dist.errors import PeerError
from hotbed.dist.handshake import Handshake

__all__ = ["LongWork"]

T = TypeVar("T")

_BEATS = 5
"""Times that a rank shows up in the time after which it counts as gone."""


class LongWork(abc.ABC):
    """The part of `hotbed.dist.ranks.Ranks` for work that takes longer than other ranks may wait.

    Attributes:
        timeout: seconds that a rank may keep the others waiting.
        size: how many ranks there are.
        tables: that they share.
        wants_end, end_wanted: whether this rank wants to end after the next step; whether one did at the last
            handshake.
    """

    timeout: float
    size: int
    tables: Sequence[object]
    wants_end: bool
    end_wanted: bool

    def __str__(self) -> str:
        return f"the ranks 0 to {self.size - 1}"

    @abc.abstractmethod
    def handshake(
        self,
        kind: str,
        values: Sequence[int] = (),
        tables: Sequence[int] = (),
        fault: BaseException | None = None,
    ) -> Handshake:
        """See `hotbed.dist.ranks.Ranks.handshake`."""

    def vote(self, kind: str, fault: BaseException | None = None) -> None:
        """Raise the fault of any rank on all of them, between what is exchanged and what is applied; errors
        are those of `handshake`."""
        self.handshake(kind, fault=fault)

    def ends(self, asked: Callable[[], bool]) -> bool:
        """Return True if any rank asked to stop at the last handshake: all end after this step. `asked`:
        returns True if this rank wants to stop, sent with the next handshake."""
        if not self.tables:
            return asked()
        self.wants_end, ends = asked() and not self.end_wanted, self.end_wanted
        self.end_wanted = False
        return ends

    @contextlib.contextmanager
    def working(self, kind: str) -> Iterator[None]:
        """For a ``with`` statement: all do something for long; it ends when all have done it, or where one
        has failed.

        Raises:
            PeerError: that was another rank.
        """
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            self.handshake(kind, [0], fault=error)
        while not bool(self.handshake(kind, [1]).values.all()):
            pass

    def heartbeat(self, kind: str, items: Iterable[T]) -> Iterator[T]:
        """Inside of `working`: shows the others now and then that this rank is there."""
        last = time.monotonic()
        for item in items:
            yield item
            if time.monotonic() - last > self.timeout / _BEATS:
                self.handshake(kind, [0])
                last = time.monotonic()

    def stopped(self, kind: str) -> None:
        """Where something has failed: waits until no rank works on it any more."""
        with contextlib.suppress(PeerError):
            self.handshake(kind)
