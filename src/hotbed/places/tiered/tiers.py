"""The tiers of a live collection, and which batches keep rows in their slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from hotbed import _core
from hotbed.errors import StorageError, TableError
from hotbed.inputs.bags import Bags
from hotbed.places.host.batch import HostBatch, core_batch
from hotbed.places.tiered import folder, hottest
from hotbed.places.tiered.batch import PreparedBatch, resolve_in_tiers
from hotbed.places.tiered.budget import by_part, ids_within
from hotbed.places.tiered.linking import Linking
from hotbed.places.tiered.prepared import Offers, Prepared
from hotbed.storage import Storage
from hotbed.table.locks import alone
from hotbed.table.lookups import Call, CallAhead, StoredTable
from hotbed.table.place import MovedTable, Place
from hotbed.table.prefetch import ALONE_AHEAD, Session, Window
from hotbed.tables import Table

__all__ = ["Tiers"]


class Tiers(Linking):
    """Tables of one group whose rows lie in tiers, the uppermost of them the core's memory.

    Threading: for the training thread. The core guards what look-ahead does beside it.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.folder = None if storage.ssd is None else folder.of_process(storage.ssd)
        """Of its rows on disk."""
        ssd = None if self.folder is None else str(self.folder)
        # It writes nothing before there are tables, and goes before the lock does.
        self.core = _core.Storage.make(*storage.budgets, ssd, storage.space_ratio)
        self._lock = None if self.folder is None else folder.lock(self.folder, storage.reset)
        # Weakly: tables keep their tiers, and go when the model does.
        self._tables: list[weakref.ref[MovedTable]] = []
        self.is_idle = False
        self.prepared: Offers[PreparedBatch] = Offers()
        self._window: weakref.ref[Window] | None = None
        self.depth = 0
        """Batches that the last window brings up ahead."""
        self._planes: object = None
        """Where rows that compute lie; None: in the core's memory."""
        self.waited_ms = 0.0
        """Time that the loop waited for rows of its next batch."""
        self.waited_for = 0
        """Batches that look-ahead had ready, but not when they were asked for."""
        self.queue_depth = 0
        """Batches that were resident beside the one taken last."""

    def add(self, table: MovedTable) -> None:
        """A new table whose rows lie here."""
        self._tables.append(weakref.ref(table))

    def give_up(self, table: MovedTable) -> None:
        """Its rows will lie elsewhere; none lies here yet."""
        self._tables = [ref for ref in self._tables if ref() is not table]

    @property
    def tables(self) -> list[MovedTable]:
        return [table for ref in self._tables if (table := ref()) is not None]

    @property
    def tiers(self) -> Tiers:
        return self

    @property
    def prefetcher(self) -> Tiers:
        return self

    @property
    def where(self) -> str:
        return f"the tiers of a Storage on {self.device}"

    # -- lookups ---------------------------------------------------------------------------------

    def allocate(self, live: Sequence[StoredTable]) -> None:
        self.release_spent()
        self.allocate_all()

    def are_allocated(self, live: Sequence[StoredTable]) -> bool:
        return not any(table.core.unallocated for table in live)

    def make_batch(
        self, live: Sequence[StoredTable], table_of: Sequence[int], bags: Sequence[Bags]
    ) -> _core.Batch:
        return core_batch(live, table_of, bags)

    def resolve(self, call: Call) -> HostBatch:
        made = self.make_batch(call.live, call.table_of, call.bags)
        batch, wanted, read = resolve_in_tiers(self, made, call)
        assert isinstance(batch, _core.Batch)
        return HostBatch(batch, call, wanted, self.over_budget, read)

    def flush(self, live: Sequence[StoredTable]) -> None:
        self.allocate_all()
        self.core.flush()
        self.note_hottest(live)

    # -- their tables ----------------------------------------------------------------------------

    def allocate_all(self) -> bool:
        """Gives every table its place, where a table or its optimizer is new. Returns True.

        Raises:
            StorageError: the budgets are too small, or this is a forked child.
            TableError: a gradient refers to rows as they lay before.
        """
        if self._lock is not None and self._lock.inherited:
            raise StorageError(
                f"Storage(ssd={str(self.folder)!r}) belongs to the process from which this one was "
                "forked. Make a collection of its own here."
            )
        tables = self.tables
        if not any(table.core.unallocated for table in tables):
            return True
        with alone(tables):
            if any(table.core.unallocated for table in tables):  # nobody else was faster
                self._lay_out(tables, "a table or an optimizer was made")
        return True

    def _lay_out(self, tables: list[MovedTable], why: str, *, again: bool = False) -> None:
        self.close_window()
        waiting = ", ".join(repr(table.name) for table in tables if table.has_gradient)
        if waiting:
            raise TableError(
                f"Table {waiting}: {why} while a gradient was waiting; rows get other slots with it. "
                "Call zero_grad() first."
            )
        for table in tables:
            table.core.wait_for_snapshot(True)
        try:
            self.core.lay_out([table.core for table in tables], again)
        except StorageError as error:
            raise too_small(error, self.storage) from None
        for table in tables:
            table.generation += 1  # slots of before mean nothing

    def move_to(self, planes: object, place_of: Callable[[_core.Table, Table], Place]) -> None:
        """Lets rows compute in planes that are made elsewhere; None: in the core's. They come along.

        Args:
            place_of: makes the new place of a table's core and description.

        Raises:
            StorageError, TableError: as `allocate_all`; rows stay where they were.
        """
        if planes is self._planes:
            return
        with alone(tables := self.tables):
            before, self._planes = self._planes, planes
            _core.set_planes(self.core, planes)
            try:
                if any(not table.core.unallocated for table in tables):
                    self._lay_out(tables, "a module was moved", again=True)
            except BaseException:
                self._planes = before
                _core.set_planes(self.core, before)
                raise
            for table in tables:
                table.adopt(place_of(table.core, table.spec))

    def release_spent(self) -> None:
        """Lets go of what a window left that is gone."""
        window = None if self._window is None else self._window()
        if self._window is not None and (window is None or window.closed):
            self.close_window()

    # -- look-ahead ------------------------------------------------------------------------------

    def prepare(self, call: CallAhead) -> Prepared:
        return Prepared(self.prepared, call)

    def open_window(self, window: Window) -> Session:
        self.close_window()
        self._window = weakref.ref(window)
        self.depth = window.depth
        return ALONE_AHEAD

    def close_window(self) -> bool:
        """Takes back what look-ahead has reserved; with the next batch it begins anew. Whether there
        was any."""
        window = None if self._window is None else self._window()
        self._window = None
        self.prepared.clear()
        if window is None or window.closed:
            return False
        window.close()
        return True

    def drop_offers(self) -> None:
        self.prepared.clear()

    def count(self, waited: float, queue: int) -> None:
        self.waited_ms += waited * 1e3
        self.queue_depth = queue

    def over_budget(self, error: StorageError) -> StorageError:
        """The same error with what the budget must be, where a batch did not fit: room for the largest
        batch so far as often as look-ahead and gradients that wait for a step hold one. Its ``needed``
        are the bytes with which this one batch would have fitted."""
        if not error.needs:
            return error
        return _with_budget(
            error,
            self.storage,
            of_host=self.storage.device is None,
            needed=self.core.compute_budget_for(error.needs)["total"],
            advised=self.core.compute_budget_for(error.needs, self.depth),
            remedy=", or use smaller batches; gradients that wait for a step keep their batches' rows too",
        )

    def ids_ahead(self) -> int:
        """Ids of batches to come that look-ahead knows where nobody says how far it is to look."""
        return ids_within(sum(self.core.capacities()), self.storage.budgets[0])

    def note_hottest(self, live: Sequence[StoredTable]) -> None:
        """Write the note for all tables of the storage.

        Raises:
            StorageError: they cannot be written.
        """
        if self.folder is not None:
            used = {table.name: table.core.hottest(hottest.COUNT) for table in self.tables}
            hottest.note(self.folder, used)

    def stats(self, live: Sequence[StoredTable]) -> dict[str, float]:
        counted: dict[str, float] = dict(self.core.counters())
        used = counted["rows_used"]
        missed = counted["rows_missed"]
        counted["hit_rate"] = (used - missed) / used if used else 1.0
        prepared = counted.pop("batches_prepared")
        counted["batches_unprepared"] = counted["batches"] - prepared
        counted["batches_ahead"] = prepared - self.waited_for
        counted["wait_ms"] += self.waited_ms
        counted["queue_depth"] = self.queue_depth
        counted["memory_bytes"] = float(self.core.memory_bytes)
        return counted


def too_small(error: StorageError, storage: Storage) -> StorageError:
    """The same error with the budget's name, where not even a row of each table fits."""
    if error.budget is None:
        return error
    of_host = storage.device is None or error.budget == "host"
    assert error.parts is not None
    return _with_budget(
        error,
        storage,
        of_host=of_host,
        needed=error.needed,
        advised=error.parts,
        remedy="; a batch needs more, as required(batch) of the model without a storage says",
    )


def _with_budget(
    error: StorageError,
    storage: Storage,
    *,
    of_host: bool,
    needed: int,
    advised: Mapping[str, int],
    remedy: str = "",
) -> StorageError:
    name = "host" if of_host else "device"
    if needed < advised["total"]:
        remedy = f"; {needed:,} would hold this batch alone{remedy}"
    made = StorageError(
        f"{str(error).rstrip('.')}. Raise Storage({name}={getattr(storage, name):,}) to at least "
        f"{advised['total']:,} bytes ({by_part(advised)}){remedy}."
    )
    made.needed = needed
    return made
