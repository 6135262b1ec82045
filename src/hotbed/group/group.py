"""`Group`: tables that share a storage, whichever modules they belong to."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence

import torch

from hotbed import _core
from hotbed.errors import StorageError, TableError
from hotbed.places.moves import factory_for, move, refuse_move
from hotbed.places.tiered.tiers import Tiers
from hotbed.storage import Storage
from hotbed.table.live import LiveTable
from hotbed.table.locks import reading
from hotbed.table.lookups import Lookups, records_of
from hotbed.table.records import Records
from hotbed.table.with_handle import TableGroup, TableWithHandle
from hotbed.tables import Table

__all__ = ["Group"]


class Group:
    """Tables that share a storage: its budgets hold for all of them together.

    >>> group = hb.Group(storage=hb.Storage(host="64MB", ssd="rows-of-run-1"))
    >>> user = hb.Embedding(None, 32, group=group)
    >>> item = hb.EmbeddingBag(1_000_000, 32, mode="mean", group=group)

    Any number of modules can put their tables into one group; a module without one makes its own. One
    optimizer steps the tables, and one `hotbed.lookahead` brings their rows up. In memory and in tiers
    results are those of modules without a group, bit for bit.

    Args:
        storage: budgets for the tiers that rows may lie in. Default: all rows in the memory that
            computes.

    Its folder on an SSD is made, and locked, when the first table comes.

    Raises:
        StorageError: `storage` is no `Storage`.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        if storage is not None and not isinstance(storage, Storage):
            raise StorageError(
                f"storage must be a hotbed.Storage, such as Storage(host='4GB'), got {storage!r}."
            )
        self._storage = storage
        self._tiers: Tiers | None = None
        self._budget = None if storage is None else storage.memory_budget()
        # Weakly: tables keep their group, and go when their modules do.
        self._tables: list[weakref.ref[LiveTable]] = []

    @property
    def storage(self) -> Storage | None:
        """Storage that the group was made with, or None."""
        return self._storage

    @property
    def tiers(self) -> Tiers | None:
        """The tiers that rows lie in; None without any, or while there are no tables."""
        return self._tiers

    @property
    def tables(self) -> list[LiveTable]:
        """Its live tables, in the order in which they came."""
        return [table for ref in self._tables if (table := ref()) is not None]

    # -- which tables there are --------------------------------------------------------------------

    def make(
        self,
        tables: Sequence[tuple[Table, int]],
        device: torch.device | None = None,
    ) -> list[LiveTable]:
        """Return new tables of these (description, key).

        Args:
            device: where they compute; None: the host.

        Raises:
            StorageError: they take more from the start than there may be, or the storage's folder cannot
                be used.
            TableError: a name that the group has already, or the tables cannot lie there.
        """
        if self._storage is not None:
            taken = {table.name for table in self.tables}
            for spec, _ in tables:
                if spec.name in taken:
                    raise TableError(
                        f"The group has a table {spec.name!r} already; tables that share a storage need "
                        "distinct names."
                    )
            self._storage.check_fit(
                [*(table.spec for table in self.tables), *(spec for spec, _ in tables)]
            )
            if self._storage.tiered and self._tiers is None:
                self._tiers = Tiers(self._storage)
        self._tables = [ref for ref in self._tables if ref() is not None]
        made = []
        for spec, key in tables:
            home = factory_for(spec, device=device, tiers=self._tiers, budget=self._budget)
            made.append(LiveTable(spec, key, home, group=self))
        return made

    def place(self, tables: Sequence[LiveTable], device: torch.device | None) -> None:
        """Bring new tables to a device, if they could not be made there."""
        if device is not None:
            for table in tables:
                refuse_move(table, device)
            for table in tables:
                move(table, device)

    def name_for(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it if the group has a table of that name."""
        taken = {table.name for table in self.tables} if self._storage is not None else set()
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        return name

    def add(self, table: TableWithHandle) -> None:
        """Note a table as one of the group."""
        assert isinstance(table, LiveTable)
        self._tables.append(weakref.ref(table))

    @classmethod
    def of(cls, tables: Sequence[LiveTable]) -> Group:
        """Return the group of tables that one module is to serve; those without a storage move into a
        common one.

        Raises:
            TableError: they belong to different groups, some of which have a storage.
        """
        groups: dict[TableGroup | None, LiveTable] = {table.group: table for table in tables}
        first = next(iter(groups))
        if len(groups) == 1 and isinstance(first, Group):
            return first
        for group, table in groups.items():
            if isinstance(group, Group) and group.storage is not None:
                raise TableError(
                    f"Table {table.name!r} has a Storage that others of these tables do not share. Give "
                    "the modules one hotbed.Group, or serve the tables by modules of their own."
                )
        made = cls()
        for table in tables:
            table.group = made
            made.add(table)
        return made

    # -- rows --------------------------------------------------------------------------------------

    def records(
        self, *, states: bool = True, current: bool = True
    ) -> Iterator[tuple[LiveTable, Records]]:
        """Stream all stored rows, some megabytes at a time, as of one step; see
        `hotbed.table.place.Place.records`."""
        return records_of(self.tables, states=states, current=current)

    def snapshot(self) -> contextlib.AbstractContextManager[None]:
        """For a ``with`` statement: rows stay as they are, while any number of threads read them."""
        return reading(self.tables)

    def flush(self) -> None:
        """Write every row that the lowest tier lacks, and to the disk, for looking at it with
        ``hotbed inspect``."""
        for lookups, tables in self._by_lookups().items():
            lookups.flush(tables)

    def note_hottest(self) -> None:
        """Write the most used ids into the folder of the SSD, for ``hotbed inspect``."""
        for lookups, tables in self._by_lookups().items():
            lookups.note_hottest(tables)

    # -- figures -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return counters of training and of the tiers since the start, of all tables together; see
        `EmbeddingCollection.stats`."""
        found: dict[str, float] = {}
        for lookups, tables in self._by_lookups().items():
            for name, value in lookups.stats(tables).items():
                found[name] = found.get(name, 0.0) + value
        if used := found.get("rows_used"):
            found["hit_rate"] = (used - found["rows_missed"]) / used
        return found

    def usage(self) -> dict[str, dict[str, int]]:
        """Return rows and bytes by table; see `EmbeddingCollection.memory`."""
        return {table.name: table.memory() for table in self.tables}

    def _by_lookups(self) -> dict[Lookups, list[LiveTable]]:
        found: dict[Lookups, list[LiveTable]] = {}
        for table in self.tables:
            found.setdefault(table.place.lookups, []).append(table)
        return found

    # -- copies ------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> Group:
        """Without its tables: copies of them come into it one by one."""
        return self._restored(self._storage, copy.deepcopy(self._budget, memo))

    def __reduce__(self) -> tuple[object, ...]:
        return Group._restored, (self._storage, self._budget)

    @classmethod
    def _restored(cls, storage: Storage | None, budget: _core.MemoryBudget | None) -> Group:
        """Return a group of rows in memory; tables in tiers are never copied."""
        made = cls()
        made._storage, made._budget = storage, budget
        return made

    def __repr__(self) -> str:
        names = ", ".join(repr(table.name) for table in self.tables) or "no tables"
        return f"Group of {names}; storage: {self._storage}"
