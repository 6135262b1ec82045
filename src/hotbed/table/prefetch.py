"""Look-ahead as tables see it: batches that are read before their forward, and who brings their rows up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from hotbed.inputs.bags import Bags

__all__ = ["ALONE_AHEAD", "BatchAhead", "Prefetcher", "ReadsBags", "Session", "Window"]

ReadsBags = Callable[[object], list[Bags]]
"""Makes bags of the inputs of a module, one for each of its features."""


class Window(Protocol):
    """A window of look-ahead: `hotbed.ahead.window.Window`."""

    @property
    def depth(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def loop(self) -> object: ...
    def close(self) -> None: ...


class BatchAhead(Protocol):
    """A batch that was read before its forward."""

    @property
    def ids(self) -> int:
        """Positions, of all features."""

    def group(self) -> bool:
        """Group its ids; False: it cannot be looked up, which its forward will say. Changes nothing."""

    def announce(self) -> None:
        """Make known which rows it needs."""

    def admit(self) -> bool:
        """Bring its rows up; False: they do not fit yet."""

    def change(self, inputs: object) -> str | None:
        """Return the error message if the inputs of a batch have changed since they were read; else None."""

    def offer(self, waited: bool) -> None:
        """Let a forward find it. `waited`: True if the loop had to wait for its rows."""


class Session(Protocol):
    """A window's part in what all processes that share the tables read ahead."""

    @property
    def patience(self) -> float | None:
        """Seconds after which to ask whether an `exchange` is slow or late; None: it never is."""

    def is_slow(self, began: float) -> bool:
        """True if an `exchange` keeps a loop waiting so long that its batch is better looked up without.

        Args:
            began: when the loop began to wait, by `time.monotonic`.
        """

    def is_late(self, began: float) -> bool:
        """True if it is not worth waiting for any more."""

    @property
    def is_closed(self) -> bool:
        """True if the window of another process was closed."""

    def exchange(self, number: int, batch: BatchAhead | None) -> bool:
        """Wait for the same batch of the others; False: it cannot be announced. Called in the order of the
        batches.

        Args:
            number: of the batch in the loop.
            batch: None: it could not be read.
        """

    def end(self) -> None:
        """Tell the others that there are no more batches."""

    def close(self) -> None:
        """Have the others told that the window is closed; waits for nobody."""


class AloneAhead:
    """`Session` of one process: nobody else has a part of its batches."""

    patience = None
    is_closed = False

    def is_slow(self, began: float) -> bool:
        return False

    def is_late(self, began: float) -> bool:
        return False

    def exchange(self, number: int, batch: BatchAhead | None) -> bool:
        return batch is not None

    def end(self) -> None:
        """Nobody is told."""

    def close(self) -> None:
        """Nobody is told."""


ALONE_AHEAD: Final = AloneAhead()


class Prefetcher(Protocol):
    """Brings rows of later batches to where they are computed."""

    @property
    def is_idle(self) -> bool:
        """True if other processes that share the tables keep it waiting."""

    def allocate_all(self) -> bool:
        """Give every table its place, where a table or its optimizer is new. False: there is none, which the
        next forward says to all processes that share them."""

    def ids_ahead(self) -> int | None:
        """Return how many ids of later batches are worth knowing; None: any number."""

    def open_window(self, window: Window) -> Session:
        """Have `window` look ahead from now on; an earlier one is closed."""

    def release_spent(self) -> None:
        """Let go of what a window left that is gone."""

    def drop_offers(self) -> None:
        """Take back what no forward has used."""

    def count(self, waited: float, queue: int) -> None:
        """Count a batch that the loop takes.

        Args:
            waited: seconds for its rows.
            queue: batches whose rows are resident beside it.
        """
