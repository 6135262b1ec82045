"""Rounds in which ranks exchange what they have read ahead, on a group of their own, beside the training.

In each round every rank says what it has. All of it is done on one thread, in the order in which it was
asked for: a rank may have to wait for others there, and nobody who trains waits with it.
"""

from __future__ import annotations

import atexit
import datetime
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, cast

from hotbed import _core
from hotbed.dist.beside import Beside
from hotbed.dist.errors import PeerError, is_gone
from hotbed.dist.ranks import Ranks
from hotbed.table.prefetch import BatchAhead, Window

__all__ = ["RoundSession", "Rounds", "Told", "Travels", "are_alike"]

_BATCH, _NONE, _END, _CLOSED, _HOST = range(5)
"""What a rank has: a batch, one that cannot be announced, no more, or a window that was closed; or it is a
memory host, which has none."""
_SENT = "ids ahead"
"""Name of their bytes in `Ranks.sent`."""
_FIRST_PATIENCE = 1.0
"""Seconds that a loop waits for the first round of a window, as nothing says that the others look ahead."""
_SLOW = 0.1
"""Seconds that a loop waits for a round where ranks have met: another rank may have taken its batch already,
and wait in a lookup."""
_FOREVER = datetime.timedelta(days=365)
"""A round may wait for loaders, and for whatever the others do before they look ahead again."""


class Told(NamedTuple):
    """Words of a rank in a round."""

    kind: int
    """What it has."""
    number: int = 0
    """Of the batch in the loop."""
    digest: int = 0
    """Of the tables that the batch is about."""
    depth: int = 0
    """Batches whose rows are to be brought up."""
    spent: int = 0
    """The last round whose batch this rank will not look up any more; nor those before."""

    @property
    def is_end(self) -> bool:
        return self.kind == _END

    @property
    def is_closed(self) -> bool:
        return self.kind == _CLOSED


def are_alike(told: Sequence[Told]) -> bool:
    """Return True if all ranks with batches have the same one, whose ids are sent then."""
    return told[0].kind == _BATCH and len({one[:3] for one in told}) == 1


class Travels(Protocol):
    """A batch of this rank whose ids are to go to their owners.

    Attributes:
        digest: of the tables that it is about.
    """

    digest: int

    def travel(self, rounds: Rounds) -> None:
        """Bring the ids to their owners. Called by all ranks.

        Raises:
            PeerError: on all ranks, as they want different things.
        """


class Rounds(Beside):
    """Messages on the thread of the rounds.

    Attributes:
        count: rounds so far, the same on all ranks within a round.
        spent: as of `Told`.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Called by all ranks."""
        self._awake = threading.Lock()
        _awake[self._awake] = os.getpid()
        super().__init__(ranks, _SENT, _FOREVER, self._awake)
        self.timeout = ranks.timeout
        self.count = self.spent = 0
        self._hosts = ranks.hosts
        self._described: dict[int, list[int]] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since: float | None = None  # when the round began that waits
        self.is_lost = False
        self._ended: weakref.ref[object] | None = None  # the loop in which a rank had no more

    @property
    def waits_since(self) -> float | None:
        """Time of the clock at which this rank began to wait for others; None: it does not."""
        return self._since

    @property
    def is_idle(self) -> bool:
        """True if there is nobody to meet, so far or any more."""
        since = self._since
        late = since is not None and time.monotonic() - since >= _FIRST_PATIENCE
        return late or self.is_lost

    @property
    def kinds(self) -> int:
        """Return how many kinds of batches memory hosts have met; a batch of a loop may be several."""
        return len(self._described)

    def open_session(self, window: Window) -> RoundSession:
        """Begin what a window of a loop exchanges."""
        return RoundSession(self, window)

    def end(self, loop: object) -> None:
        """Have later windows of a loop exchange nothing, as a rank has no more."""
        self._ended = weakref.ref(loop)

    def has_ended(self, loop: object) -> bool:
        return self._ended is not None and self._ended() is loop

    def call(self, work: Callable[[], bool]) -> Future[bool]:
        """Do this on the thread of the rounds."""
        made: Future[bool] = Future()

        def task() -> None:
            try:
                made.set_result(work())
            except BaseException as error:
                made.set_exception(error)

        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work,
                args=(self._tasks, self._awake),
                name="hotbed-lookahead: ranks",
                daemon=True,
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None).atexit = False
        return made

    def meet(self, own: Told) -> list[Told] | None:
        """Return what each rank tells that is no memory host. None: they do not meet any more."""
        if self.is_lost:
            return None
        self._since = time.monotonic()
        try:
            told = [Told(*numbers) for numbers in self.gather(own).tolist()]
        except RuntimeError:  # a rank is gone, of which the training hears in its own exchanges
            self.leave()
            return None
        finally:
            self._since = None
        self.count += 1
        return [one for rank, one in enumerate(told) if rank not in self._hosts]

    def listen(self) -> list[Told] | None:
        """Do as `meet`, where this rank is a memory host."""
        return self.meet(Told(_HOST))

    def describe(self, digest: int, own: Sequence[int] = ()) -> list[int]:
        """Return what the digest of a batch stands for, which ranks with batches tell memory hosts once.
        Called by all ranks in the round of such a batch, where there are memory hosts.

        Args:
            own: the same on all ranks with batches; nothing on memory hosts.
        """
        if digest not in self._described:
            size = int(self.gather([len(own)]).max())
            told = self.gather([*own, *[0] * (size - len(own))])
            self._described[digest] = told[0].tolist()  # rank 0 has batches
        return self._described[digest]

    def leave(self) -> None:
        """Meet nobody any more; the others hear of it."""
        self.is_lost = True
        self._wire.leave()


class RoundSession:
    """`hotbed.table.prefetch.Session`: what one window exchanges. It ends for all ranks with the first that
    has no more, which ends those of later windows of the loop, too; or that closes its window."""

    def __init__(self, rounds: Rounds, window: Window) -> None:
        self._rounds, self._loop, self._depth = rounds, window.loop, window.depth
        self._joined = self._over = self._closing = False
        self._waits = False
        self.is_closed = False

    @property
    def patience(self) -> float:
        return _SLOW if self._rounds.count else _FIRST_PATIENCE

    def is_slow(self, began: float) -> bool:
        return not self._joined and self._rounds.count > 0 and self._waited(began) >= _SLOW

    def is_late(self, began: float) -> bool:
        patience = self._rounds.timeout / 2 if self._joined else _FIRST_PATIENCE
        return self._waited(began) >= patience

    def _waited(self, began: float) -> float:
        since = self._rounds.waits_since
        return time.monotonic() - max(since, began) if self._waits and since is not None else 0.0

    def exchange(self, number: int, batch: BatchAhead | None) -> bool:
        travels = cast("Travels | None", batch)
        self._waits = True
        try:
            return self._rounds.call(lambda: self._exchange(number, travels)).result()
        finally:
            self._waits = False

    def end(self) -> None:
        self._rounds.call(lambda: self._leave(_END))

    def close(self) -> None:
        self._closing = True
        self._rounds.call(lambda: self._leave(_CLOSED))

    # -- on the thread of the rounds -------------------------------------------------------------

    def _exchange(self, number: int, batch: Travels | None) -> bool:
        rounds = self._rounds
        kind, digest = (_NONE, 0) if batch is None else (_BATCH, batch.digest)
        self._over = self._over or rounds.has_ended(self._loop)
        while not self._over:
            told = self._meet(kind, number, digest)
            if told is None:
                break
            self._joined = True
            if any(one.is_end or one.is_closed for one in told):
                self._over, self.is_closed = True, any(one.is_closed for one in told)
                break
            last = max(one.number for one in told)
            if number < last:
                break  # a rank is further on
            if any(one.number < last for one in told):
                if self._closing:
                    break  # which is told instead
                continue
            if batch is None or not are_alike(told):
                break
            return self._travel(batch)
        return False

    def _travel(self, batch: Travels) -> bool:
        """Bring ids to their owners; False: ranks want different things, or one is gone."""
        try:
            batch.travel(self._rounds)
        except PeerError:
            return False
        except BaseException as error:
            self._rounds.leave()
            if not isinstance(error, RuntimeError) or not is_gone(error):
                raise
            self._over = True  # training hears of it in its own exchanges
            return False
        return True

    def _leave(self, kind: int) -> bool:
        if self._joined and not self._over:
            self._meet(kind, 0, 0)
        self._over = True
        return False

    def _meet(self, kind: int, number: int, digest: int) -> list[Told] | None:
        spent = self._rounds.spent
        told = self._rounds.meet(Told(kind, number, digest, self._depth, spent))
        if told is None:
            self._over = True
        elif any(one.is_end for one in told):
            self._rounds.end(self._loop)
        return told


_awake: weakref.WeakKeyDictionary[threading.Lock, int] = weakref.WeakKeyDictionary()
"""Locks of rounds, which their threads hold but while they wait, and the process of each."""


_LONGEST_END = 30.0
"""Seconds that the end of a process waits for a round to wait."""


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None], awake: threading.Lock) -> None:
    _core.use_one_thread()
    while (task := tasks.get()) is not None:
        with awake:
            task()
            del task


@atexit.register
def _stop_all() -> None:
    """Where the interpreter ends, a thread inside of torch would abort the process."""
    for awake, process in list(_awake.items()):
        if process == os.getpid():  # a forked one has no thread that would let go of the lock
            awake.acquire(timeout=_LONGEST_END)
