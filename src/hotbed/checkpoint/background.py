"""Saves that go on while a model trains."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from hotbed import _core
from hotbed.checkpoint.begun import Begun, Saved
from hotbed.checkpoint.deltas import mark
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.ranks import KIND
from hotbed.checkpoint.rows import most_bytes
from hotbed.dist.by_store import ByStore
from hotbed.dist.ranks import Ranks
from hotbed.table.alone import ALONE, Processes
from hotbed.table.live import LiveTable
from hotbed.table.locks import alone
from hotbed.table.lookups import snapshot_of
from hotbed.table.records import NO_ROWS, Records, RowsOfMoment
from hotbed.table.sparse_gradient import plain_access

__all__ = ["Saving", "in_background", "raise_unheard", "snapshot_of_all", "turn"]


class Saving:
    """A save under way, as `hotbed.save` returns it with ``blocking=False``. It ends on a thread of its own,
    for which the end of the process waits.

    Attributes:
        step: of the checkpoint.
        root: folder of the run.
        is_begun: whether it is under way, or was.
    """

    is_begun = False

    def __init__(self, step: int, root: str, rows: RowsOfMoment | None = None) -> None:
        """`root`: folder of the run. `rows`: that are written; None: there is nothing to wait for."""
        self.step, self.root = step, root
        self._process = os.getpid()
        self._rows, self._waited = rows, 0.0
        self._ended = threading.Event()
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._is_heard = False

    def done(self) -> bool:
        """Return True if the checkpoint is complete, or has failed."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            TimeoutError: it is not complete by then.
            CheckpointError, OSError, StorageError: it could not be written.
        """
        if os.getpid() != self._process:
            raise CheckpointError("A save in the background is one of the process that was forked.")
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The save of step {self.step} takes more than {timeout} s.")
        self._is_heard = True
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    @property
    def error(self) -> BaseException | None:
        """Return why it has failed; None where it has not, or not yet."""
        if self._error is not None:
            self._is_heard = True
        return self._error

    @property
    def waited(self) -> float:
        """Return the seconds that steps have waited, as ``snapshot_memory`` was full of rows that they were
        about to change."""
        rows = self._rows
        return self._waited if rows is None else rows.waited

    @classmethod
    def of(cls, saved: Saved) -> Saving:
        """Return one that has ended."""
        made = cls(saved.step, os.path.dirname(saved.path))
        made.run(lambda: saved)
        return made

    # -- for `hotbed.save` -----------------------------------------------------------------------

    def run(self, work: Callable[[], Saved]) -> None:
        """Do the work on this thread."""
        try:
            self._saved = work()
        except BaseException as error:
            self._error = _without_frames(error)
            _core.give_back_freed()
        finally:
            self._waited, self._rows = self.waited, None
            self._ended.set()

    def begin(self, work: Callable[[], Saved]) -> None:
        """Do the work on another thread.

        Raises:
            BaseException: it could not be started, or the user has interrupted that; `is_begun` says which.
        """
        claim = threading.Lock()

        def claimed() -> None:
            if claim.acquire(blocking=False):
                with contextlib.suppress(OSError):  # the training comes first
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
                _core.use_one_thread()
                self.run(work)

        try:
            threading.Thread(target=claimed, name="hotbed-save").start()
            self.is_begun = True
        except BaseException:
            self.is_begun = not claim.acquire(blocking=False)
            raise

    def wait_for_end(self) -> None:
        """Wait until it is complete, or has failed."""
        self._ended.wait()

    def take_unheard(self) -> BaseException | None:
        """Return the error that nobody has asked for, once."""
        if self._is_heard or self._error is None:
            return None
        self._is_heard = True
        return self._error


def _without_frames(error: BaseException) -> BaseException:
    """Return an error that keeps nothing alive of what has failed, with a note of where that was."""
    if sys.version_info >= (3, 11):
        where = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"In the thread that saved:\n{where}")
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        one.__traceback__ = None
        causes = (one.__cause__, one.__context__)
        left += [other for other in causes if other is not None and other.__traceback__ is not None]
    return error


class Turn:
    """Whose turn it is to save in the background: one after the other in a process.

    Attributes:
        last: the last save that went on in the background.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last: Saving | None = None

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """For a ``with`` statement, which may end on another thread."""
        self._lock.acquire()
        try:
            self.wait()  # the last one gave its turn away before it said how it has ended
            yield
        finally:
            self._lock.release()

    def saving_to(self, root: str) -> Saving | None:
        """Return the save to a folder that is under way."""
        last = self.last
        return last if last is not None and last.root == root and not last.done() else None

    def wait(self) -> None:
        """Wait until nothing is saved in the background."""
        if self.last is not None:
            self.last.wait_for_end()

    def forget(self) -> None:
        """In a forked process: what is saved by the one before is none of its own."""
        self._lock, self.last = threading.Lock(), None


@atexit.register
def _tell_unheard() -> None:
    last = turn.last
    error = None if last is None else last.take_unheard()
    if last is not None and error is not None:
        sys.stderr.write(
            f"hotbed.save: the save of step {last.step} in the background has failed: "
            f"{type(error).__name__}: {error}\n"
        )


turn = Turn()
os.register_at_fork(after_in_child=turn.forget)


def raise_unheard() -> None:
    """Raise CheckpointError where the last save in the background has failed and nobody has heard of it."""
    last = turn.last
    error = None if last is None else last.take_unheard()
    if last is not None and error is not None:
        raise CheckpointError(
            f"The save of step {last.step} in the background has failed, so this one was not begun: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def giving_memory_back() -> Iterator[None]:
    """Return to the system, at the end, what work on whole tables has freed, which no step needs."""
    try:
        yield
    finally:
        _core.give_back_freed()


_NICE = 10
"""Niceness of the thread that writes: it gets a tenth of a core that somebody else wants, too."""
_LEAST_MEMORY = 64 << 20
_MEMORY_SHARE = 20
"""Of the bytes of rows, for those that were changed and not written yet."""


def snapshot_of_all(begun: Begun, ranks: Processes, memory: int | None) -> RowsOfMoment | None:
    """Return the rows of a checkpoint as they are now, while the tables are held; None: on some rank they can
    be read only while nobody changes them. Called by all ranks."""
    if not threading.main_thread().is_alive():
        return None  # an ending process begins no thread
    tables = {table: begun.since.get(stem, 0) for stem, table in begun.own.items()}
    states = begun.call["states"]
    if memory is None:
        memory = max(_LEAST_MEMORY, most_bytes(begun.own, states=True) // _MEMORY_SHARE)
    rows: RowsOfMoment | None = NO_ROWS
    with ranks.reporting(KIND):
        if not states and any(table.follows for table in tables):
            rows = None  # they are to be brought up to date, by steps that are not taken yet
        elif tables:
            rows = snapshot_of(tables, memory=memory)
    everywhere = False
    try:
        everywhere = all(ranks.values_of_all(KIND, rows is not None))
    finally:
        if rows is not None and not everywhere:
            rows.end()
    return rows if everywhere else None


def in_background(
    begun: Begun, ranks: Processes, rows: RowsOfMoment, held: contextlib.ExitStack
) -> Saving:
    """Begin to write a checkpoint on a thread of its own, while the tables are held.

    Args:
        held: what is left when that has ended, with its error.
    """
    saving, before, peers = None, turn.last, cast(Processes, ALONE)
    try:
        marks = mark(begun.own.values())
        tensors = {name: tensor.clone() for name, tensor in begun.tensors.items()}
        begun = begun._replace(tensors=tensors)
        if isinstance(ranks, Ranks):
            peers = ByStore(ranks, str(begun.about["uid"]))
        saving = Saving(begun.call["step"], begun.call["path"], rows)
        turn.last = saving
        versions = {table: _version_of(table) for table in begun.own.values()}
        saving.begin(functools.partial(_finish, begun, peers, rows, marks, held, versions))
    except BaseException:
        if saving is not None and saving.is_begun:
            raise  # while it is written
        turn.last = before
        rows.end()
        with held, peers.reporting(KIND):
            raise
    return saving


def _version_of(table: LiveTable) -> int:
    """Return torch's count of writes into the handle of a table."""
    with plain_access():
        return int(table.parameter._version)


def _finish(
    begun: Begun,
    ranks: Processes,
    rows: RowsOfMoment,
    marks: Mapping[LiveTable, int],
    held: contextlib.ExitStack,
    versions: Mapping[LiveTable, int],
) -> Saved:
    tables = list(begun.own.values())

    def copied() -> Iterator[tuple[LiveTable, Records]]:
        for at, some in rows.records(states=begun.call["states"]):
            yield tables[at], some
        for table, version in versions.items():
            if _version_of(table) != version:
                raise CheckpointError(
                    f"Table {table.name!r}: its parameter was written in place while it was saved in the "
                    "background, so that rows may be others than they were. Save again, or with "
                    "blocking=True."
                )

    def forget() -> None:
        rows.stop()
        with alone(tables):
            rows.end()

    with held, giving_memory_back():
        if isinstance(ranks, ByStore):
            ranks.show_signs()
        try:
            saved = begun.finish(ranks, copied(), marks, beside=True)
        finally:
            forget()
        if isinstance(ranks, ByStore):
            ranks.leave()
        return saved
