"""Processes that meet by the store of their process group, beside what they exchange otherwise."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

from hotbed.dist.errors import PeerError
from hotbed.dist.ranks import Ranks
from hotbed.dist.timeouts import store_of

__all__ = ["ByStore"]

T = TypeVar("T")

_PAUSE = 0.01
"""Seconds between two looks whether others have come."""
_ALIVE = 1.0
"""Seconds between two signs of life."""


class ByStore:
    """`hotbed.table.alone.Processes` of one thread of each rank, which need no connections of their own. One
    that has failed tells the others, and one of which nothing is heard for the ranks' timeout is gone."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        """`name`: the same on all ranks, and new."""
        self.rank, self.size, self.trainers = ranks.rank, ranks.size, ranks.trainers
        self._timeout = ranks.timeout
        self._store = store_of(f"beside/{name}")
        self._meetings = 0
        self._left = threading.Event()

    def show_signs(self) -> None:
        """Begin to show the others that this process lives."""
        threading.Thread(target=self._sign, name="hotbed-alive", daemon=True).start()

    def reporting(self, kind: str) -> contextlib.AbstractContextManager[object]:
        return self._telling(kind)

    def listening(self, waits: str = "") -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def working(self, kind: str) -> Iterator[None]:
        with self._telling(kind):
            yield
        self.values_of_all(kind, None)

    def heartbeat(self, kind: str, items: Iterable[T]) -> Iterable[T]:
        return items

    def values_of_all(self, kind: str, value: T) -> list[T]:
        """Return the value that each rank gives, of JSON's types."""
        return [cast(T, one) for one in self._meet(value, kind)]

    def ends(self, asked: Callable[[], bool]) -> bool:
        return any(self.values_of_all("the end", asked()))

    def stopped(self, kind: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"stopped/{self.rank}", "")
            keys = [f"stopped/{rank}" for rank in range(self.size)]
            self._await(keys, kind, until_fault=False)
        self._left.set()

    def leave(self) -> None:
        """End the meetings. The first rank, which may have the store, waits until the others have."""
        with contextlib.suppress(RuntimeError):
            if self.rank:
                self._store.set(f"left/{self.rank}", "")
            else:
                self._await([f"left/{rank}" for rank in range(1, self.size)], "the end")
        self._left.set()

    @contextlib.contextmanager
    def _telling(self, kind: str) -> Iterator[None]:
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self._store.set("fault", f"Rank {self.rank} could not go on with {kind}: {error}")
            raise

    def _meet(self, own: object, kind: str) -> list[object]:
        number, self._meetings = self._meetings, self._meetings + 1
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], json.dumps(own))
            self._await(keys, kind)
            return [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"Rank {self.rank} cannot reach the others: {error}") from None

    def _await(self, keys: list[str], kind: str, *, until_fault: bool = True) -> None:
        """Wait for others, as long as each that is missing shows signs of life."""
        begun = time.monotonic()
        heard: dict[str, tuple[bytes, float]] = {}  # by rank the last sign, and when it came
        while missing := [key for key in keys if not self._store.check([key])]:
            if until_fault and self._store.check(["fault"]):
                raise PeerError(self._store.get("fault").decode())
            now = time.monotonic()
            for rank in (key.rsplit("/", 1)[1] for key in missing):
                alive = f"alive/{rank}"
                sign = self._store.get(alive) if self._store.check([alive]) else b""
                before, since = heard.get(rank, (b"", begun))
                heard[rank] = sign, since if sign == before else now
                if now - heard[rank][1] > self._timeout:
                    text = f"Nothing was heard of rank {rank} for {self._timeout:g} s in {kind}."
                    self._store.set("fault", text)  # which hears it if it was only slow
                    raise PeerError(text)
            time.sleep(_PAUSE)

    def _sign(self) -> None:
        """Show others that this process lives, until the meetings end."""
        signs = 0
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._left.wait(_ALIVE):
                signs += 1
                self._store.set(f"alive/{self.rank}", str(signs))
