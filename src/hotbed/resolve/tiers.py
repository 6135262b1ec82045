"""The tiers of a live collection, and which batches keep rows in their slots."""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotbed import _core
from hotbed.errors import StorageError, TableError
from hotbed.parameters import plain_access
from hotbed.storage import Storage

if TYPE_CHECKING:
    from hotbed.handles import LiveTable
    from hotbed.resolve.lookup import Prepared

__all__ = ["Tiers"]


class Tiers:
    """What tables of one collection share that has tiers.

    Threading: for the training thread. The core guards what look-ahead does beside it.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        if storage.ssd is not None:
            weakref.finalize(self, os.close, _take(Path(storage.ssd), storage.reset))
        self.core = _core.Storage.make(
            *storage.budgets,
            None if storage.ssd is None else os.fspath(storage.ssd),
            storage.reset,
            storage.space_ratio,
        )
        self.tables: list[LiveTable] = []
        self._held: list[tuple[Any, list[LiveTable]]] = []
        self.prepared: list[Prepared] = []
        """Batches that look-ahead has yielded and no forward has used."""
        self._window: weakref.ref[Any] | None = None
        self.stall_ms = 0.0
        """Time that the loop waited for look-ahead."""
        self.queue_depth = 0
        """Batches that were resident beside the one taken last."""

    def settle(self) -> None:
        """Gives every table its place, where a table or its optimizer is new.

        Raises:
            StorageError: the budgets are too small.
            TableError: a gradient refers to rows as they lay before.
        """
        if not any(table.core.homeless for table in self.tables):
            return
        self.close_window()
        self.release_spent()
        if self._held:
            names = ", ".join(repr(t.name) for t in self._held[0][1])
            raise TableError(
                f"Table {names}: an optimizer was made while a gradient was waiting; rows get other "
                "slots with it. Call zero_grad() first."
            )
        self.core.lay_out([table.core for table in self.tables])

    def hold(self, claim: Any, tables: Iterable[LiveTable]) -> None:
        """Keeps the rows of a batch where they are until none of the tables has a gradient."""
        self._held.append((claim, list(tables)))

    def release_spent(self) -> None:
        """Lets go of batches whose gradients are gone."""
        if not self._held or torch._C._current_graph_task_id() != -1:
            return
        with plain_access():
            self._held = [
                (claim, tables)
                for claim, tables in self._held
                if any(table.parameter.grad is not None for table in tables)
            ]

    # -- look-ahead ------------------------------------------------------------------------------

    def open_window(self, window: Any) -> None:
        """`window` is the one that looks ahead from now on; an earlier one is closed."""
        self.close_window()
        self._window = weakref.ref(window)

    def close_window(self) -> None:
        """Takes back what look-ahead has reserved."""
        window = None if self._window is None else self._window()
        self._window = None
        self.prepared.clear()
        if window is not None:
            window.close()

    def take_prepared(self, signature: Any, frozen: list[int]) -> Prepared | None:
        """The core batch that look-ahead made for this input, or None."""
        for at, prepared in enumerate(self.prepared):
            if prepared.signature == signature and prepared.frozen == frozen:
                del self.prepared[at]
                return prepared
        return None

    def stats(self) -> dict[str, float]:
        """What the tiers have done; see `EmbeddingCollection.stats`."""
        counted: dict[str, float] = dict(self.core.counters())
        used = counted["rows_used"]
        missed = counted["rows_missed"]
        counted["hit_rate"] = (used - missed) / used if used else 1.0
        counted["batches_unprepared"] = counted["batches"] - counted["batches_ahead"]
        counted["stall_ms"] = self.stall_ms
        counted["queue_depth"] = self.queue_depth
        counted["memory_bytes"] = float(self.core.memory_bytes)
        return counted


def _take(folder: Path, reset: bool) -> int:
    """Locks a folder for the rows of one collection, until the file that is returned is closed.

    Raises:
        StorageError: another collection uses it, or it holds rows, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"Storage(ssd={str(folder)!r}) cannot be used: {error}.") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(lock, 32).decode().strip() or "unknown"
            raise StorageError(
                f"Storage(ssd={str(folder)!r}) is in use by process {owner}. Give each collection a "
                "folder of its own."
            ) from None
        held = sorted(folder.glob("rows-*"))
        if held and not reset:
            raise StorageError(
                f"Storage(ssd={str(folder)!r}) holds rows of an earlier run ({held[0].name}). They come "
                "from different steps, so training cannot go on from them: look at them with 'hotbed "
                "inspect', and pass reset=True to delete them."
            )
        for old in held:
            shutil.rmtree(old)
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def over_budget(error: StorageError, tiers: Tiers) -> StorageError:
    """The same error with what the budget must be."""
    capacities = tiers.core.capacities()
    if not capacities or not error.needed or "at once" not in str(error):
        return error
    name = "device" if tiers.storage.device is not None else "host"
    budget, _ = tiers.storage.budgets
    factor = error.needed / max(1, min(capacities))
    return StorageError(
        f"{str(error).rstrip('.')}. Raise Storage({name}={budget:,}) to about "
        f"{int(budget * factor * 1.05) + 1:,} bytes, or use smaller batches; gradients that wait for a "
        "step keep their batches' rows too."
    )
