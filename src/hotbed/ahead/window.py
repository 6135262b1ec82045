"""The window of a look-ahead: batches on their way, and the threads that bring them."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from hotbed import trace
from hotbed.ahead.inputs import Inputs, InputsOfModules
from hotbed.ahead.source import Entry, Source
from hotbed.ahead.threads import BRINGING_UP, READING, WORKS, started
from hotbed.errors import HotbedError, InputError
from hotbed.modules.owner import TableOwner
from hotbed.table.prefetch import BatchAhead, Prefetcher

__all__ = ["BRINGING_UP", "READING", "Inputs", "Window"]

_USUAL, _MOST = 32, 128
_MANY_IDS = 1 << 17
"""Batches whose ids are known where nobody says how many: so many as have as many ids as are worth
knowing, up to the first number, or to the second while they are small."""


class Settings(Protocol):
    """Settings of a window; see `hotbed.ahead.lookahead.lookahead`."""

    model: nn.Module
    inputs: Inputs | None

    @property
    def depth(self) -> int: ...

    @property
    def horizon(self) -> int | None: ...

    @property
    def given(self) -> int: ...

    def say(self, about: str, message: str) -> None: ...


class Window:
    """Batches on their way, and the threads that bring them.

    One thread reads the loader and announces, one brings rows up, so neither a slow loader nor a
    slow disk keeps the other waiting; the training thread alone takes batches. `_moved` guards
    everything below it.
    """

    def __init__(
        self,
        source: Source[Any],
        modules: Mapping[str, TableOwner],
        settings: Settings,
    ) -> None:
        self._source, self._say = source, settings.say
        self.loop: object = source
        """The same for all windows of a loop."""
        # Who changes a setting means the next loop; this one might wait for what was not begun.
        self.depth = settings.depth
        """Batches whose rows are brought up."""
        self._horizon = settings.horizon
        self._modules = dict(modules)
        self._prefetchers: dict[str, Prefetcher] = {}
        for name, module in modules.items():
            prefetcher = module.prefetcher
            assert prefetcher is not None
            self._prefetchers[name] = prefetcher
        self._every = list(dict.fromkeys(self._prefetchers.values()))
        self._inputs = InputsOfModules(settings.model, self._modules, settings.inputs)
        self._process = os.getpid()
        self._moved = threading.Condition()
        self._entries: deque[Entry] = deque()
        self._ids = 0  # in them
        self.closed = False
        self.at_work: set[str] = set()  # what threads are doing
        self._in_user_code = False  # READING is
        self._in_exchange = False  # READING waits for other processes
        self._asked = False  # whether the loop waits for a batch
        self._asked_at = 0.0
        # What was not read could not be told from what a loader has filled again.
        self._only_when_asked = False
        self.failure: BaseException | None = None  # what a thread died of
        self._taken = False  # any batch
        self._number = settings.given  # of the next batch that is read
        self._round = 0  # of releases: what did not fit is tried once a round
        self._message: tuple[str, str] | None = None  # what it is about, and what it says
        counts = [count for one in self._every if (count := one.ids_ahead()) is not None]
        self._most_ids = sum(counts) if counts else _MANY_IDS
        self._sessions = {prefetcher: prefetcher.open_window(self) for prefetcher in self._every}
        self._threads = started(self, self._moved)
        with _of_windows:
            _windows.add(self)

    # -- the training thread ---------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        while True:
            with trace.span("wait for a batch"):
                entry = self._next()
            if entry is None:
                return
            yield entry.given()

    def _next(self) -> Entry | None:
        """The next batch; None: there is no more, or the window was closed."""
        for prefetcher in self._every:
            prefetcher.drop_offers()
            prefetcher.release_spent()
        waited = 0.0  # for rows: a loader that is slow would be so without look-ahead
        with self._moved:
            self._round += 1
            self._asked = True
            self._asked_at = time.monotonic()
            self._moved.notify_all()
            while not (self.closed or self.failure or self._ready() or self._give_up()):
                began = time.perf_counter() if self._entries else None
                self._moved.wait(self._patience)
                if began is not None:
                    waited += time.perf_counter() - began
            self._asked = False
            message, self._message = self._message or self._inputs.message, None
            self._inputs.message = None
        if message is not None:
            self._say(*message)
        with self._moved:
            if self.failure is not None:
                raise self.failure
            if self.closed or not self._entries:
                return None
            entry = self._entries.popleft()
            self._ids -= entry.ids
            admitted = sum(e.admitted for e in self._entries)
            self._taken = True
            self._moved.notify_all()
        try:
            change = self._change(entry)
        except BaseException:
            entry.prepared = {}
            raise
        finally:
            entry.read = {}
        if change is not None:
            entry.prepared = {}
            raise InputError(change)
        for prepared in entry.prepared.values():
            prepared.offer(entry.admitted and waited > 0)
        for prefetcher in {self._prefetchers[name] for name in entry.prepared}:
            prefetcher.count(waited, admitted)
        entry.prepared = {}
        return entry

    def _change(self, entry: Entry) -> str | None:
        """Return the message for a batch that is no longer what was announced."""
        for name, read in entry.read.items():
            inputs = self._inputs.of(entry.batch, name)
            if (change := read.change(inputs)) is not None:
                return change
        return None

    def _ready(self) -> bool:
        if not self._entries:
            return not self._source.more and READING not in self.at_work
        first = self._entries[0]
        if first.read and not first.announced:
            if any(session.is_slow(self._asked_at) for session in self._sessions.values()):
                return True
        return first.admitted or first.failed or first.tried == self._round

    def _give_up(self) -> bool:
        """Close the window if other processes keep the loop waiting for its next batch for too long."""
        if not (self._entries and self._entries[0].announced):
            self.closed = any(
                session.is_late(self._asked_at) for session in self._sessions.values()
            )
        return self.closed

    @property
    def _patience(self) -> float | None:
        """Seconds after which to see whether other processes are late."""
        some = [s.patience for s in self._sessions.values() if s.patience is not None]
        return min(some) if some else None

    def close(self, *, patience: float = 1.0) -> None:
        """Ends the threads, takes back what was reserved, and gives the source what was read.

        It waits for what they are at, but not for other processes, and for a loader, or a function over
        its batches, that blocks no longer than `patience` seconds: the thread ends when it is let go, and
        what comes is left in the source.
        """
        if os.getpid() != self._process:
            # A forked child has neither the threads nor, for sure, the locks that they held.
            self.closed = True
            _abandoned.append(self)
            return
        with self._moved:
            self.closed = True
            self._moved.notify_all()
            if threading.current_thread() in self._threads:
                return  # garbage was collected there; what is reserved goes with the window
            if not self._moved.wait_for(lambda: not self.at_work or self._exchanges, patience):
                self._moved.wait_for(lambda: not self.at_work or self._blocked)
            blocked = self._blocked
        for thread, work in zip(self._threads, WORKS, strict=True):
            if not (blocked and work == READING):
                thread.join()
        # What is reserved is let go in this order.
        left = [Entry(entry.batch, error=entry.error) for entry in self._entries]
        while self._entries:
            self._entries.popleft()
        self._source.unread.extendleft(reversed(left))
        for prefetcher, session in self._sessions.items():
            prefetcher.drop_offers()
            session.close()

    @property
    def _blocked(self) -> bool:
        """Whether nothing goes on but code of the user, or of other processes."""
        return (self._in_user_code and self.at_work == {READING}) or self._exchanges

    @property
    def _exchanges(self) -> bool:
        """Whether nothing goes on but code of other processes."""
        return self._in_exchange and self.at_work == {READING}

    # -- the threads -----------------------------------------------------------------------------

    def task(self, work: str) -> Callable[[], None] | None:
        """Return what to do next; call it under `_moved`."""
        if work == READING:
            if self._knows_enough() or not self._source.more:
                return None
            if self._only_when_asked and (self._entries or not self._asked):
                return None
            return self._fetch
        for entry in itertools.islice(self._entries, self.depth):
            if entry.admitted or entry.failed:
                continue
            if not entry.announced:
                break
            if entry.tried != self._round:
                number = self._round
                return lambda: self._admit(entry, number)
            break
        return None

    def _knows_enough(self) -> bool:
        batches = len(self._entries)
        if self._horizon is not None:
            return batches >= max(self.depth, self._horizon)
        if batches <= self.depth:
            return False
        if batches >= _MOST or self._ids >= self._most_ids:
            return True
        return batches >= _USUAL and self._ids >= _MANY_IDS

    def _fetch(self) -> None:
        with self._moved:
            self._in_user_code = True
            self._moved.notify_all()
        try:
            with trace.span("read a batch"):
                entry = self._source.read(self._is_open, self._look)
        finally:
            self._is_open()
        if entry is None:
            if not self._source.more:
                for session in self._sessions.values():
                    session.end()
            return
        with self._moved:
            entry.number, self._number = self._number, self._number + 1
            self._entries.append(entry)
        if not self.closed:
            self._announce(entry)

    def _is_open(self) -> bool:
        """Whether a batch is still wanted; whoever closes the window waits from now on."""
        with self._moved:
            self._in_user_code = self._in_exchange = False
            return not self.closed

    def _look(self, entry: Entry) -> None:
        """Find what goes into modules that are trained; evaluation brings nothing up."""
        if entry.error is not None or self.closed:
            return
        try:
            for name, module in self._modules.items():
                if module.training:
                    inputs = self._inputs.of(entry.batch, name)
                    if inputs is not None:
                        entry.inputs[name] = inputs
        except HotbedError:
            entry.inputs, entry.failed = {}, True  # an error of its forward, when its turn comes
        except BaseException as error:
            entry.inputs, entry.error = {}, error

    def _announce(self, entry: Entry) -> None:
        every = {name: self._group(entry, name) for name in self._modules}
        read = {name: batch for name, batch in every.items() if batch is not None}
        prepared: dict[str, BatchAhead] = {}
        with self._moved:
            entry.read = read
        for at, (name, batch) in enumerate(every.items()):
            session = self._sessions[self._prefetchers[name]]
            with self._moved:
                self._in_exchange = True
                self._moved.notify_all()
            try:
                agreed = session.exchange(entry.number * len(self._modules) + at, batch)
            finally:
                is_open = self._is_open()
            if not is_open:
                return
            if session.is_closed:
                self.closed = True  # the next batch opens another window, as on the other processes
                return
            if agreed and batch is not None:
                with trace.span("announce ids"):
                    batch.announce()
                prepared[name] = batch
        entry.inputs = {}
        with self._moved:
            entry.announced = True
            entry.failed = entry.failed or entry.error is not None
            self._only_when_asked = not read
            if entry in self._entries:  # the loop may have gone on without
                entry.prepared = prepared
                entry.ids = sum(batch.ids for batch in read.values())
                self._ids += entry.ids
            self._moved.notify_all()

    def _group(self, entry: Entry, name: str) -> BatchAhead | None:
        """Read what goes into a module; None: nothing does, or it cannot be looked up."""
        if name not in entry.inputs or entry.failed or entry.error is not None:
            return None
        try:
            with trace.span("group ids"):
                batch = self._modules[name].prepare(entry.inputs[name])
                if batch.group():
                    return batch
            entry.failed = True
        except HotbedError:
            # A batch that cannot be looked up is an error of its forward, when its turn comes.
            entry.failed = True
        except BaseException as error:  # of what reads a batch of a kind of its own
            entry.error = error
        return None

    def _admit(self, entry: Entry, number: int) -> None:
        fits, failed = False, False
        try:
            with trace.span("bring rows up"):
                fits = all(prepared.admit() for prepared in entry.prepared.values())
        except Exception:
            failed = True  # the forward tries again, and says so
        with self._moved:
            entry.admitted, entry.failed, entry.tried = fits, failed, number
            ahead = self._entries.index(entry) if entry in self._entries else 0
            if not fits and not failed and self._taken and self._message is None:
                self._message = (
                    "budget",
                    f"The budget holds {ahead} batches beside the one that is trained on, not "
                    f"depth={self.depth}: look-ahead is shorter now. Raise the budget, or "
                    "lower depth.",
                )


_windows: weakref.WeakSet[Window] = weakref.WeakSet()
_of_windows = threading.Lock()
_abandoned: list[Window] = []


@atexit.register
def _close_windows() -> None:
    """A thread that is in the core while the interpreter ends would bring it down."""
    with _of_windows:
        windows = list(_windows)
    for window in windows:
        window.close(patience=0.0)
