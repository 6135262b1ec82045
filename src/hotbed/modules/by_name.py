"""`TablesByName`: rows of a module's tables, read and written from outside by the table's name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from hotbed.errors import TableError
from hotbed.modules.owner import TableOwner
from hotbed.table.alone import ALONE
from hotbed.table.checks import Missing
from hotbed.table.live import LiveTable
from hotbed.table.local import (
    local_assign,
    local_contains,
    local_count,
    local_erase,
    local_lookup,
    local_rows,
)
from hotbed.tables import Table

__all__ = ["Rows", "TablesByName"]


class Rows(NamedTuple):
    """Rows of a table by rising id."""

    ids: Tensor
    """(n,) int64"""
    values: Tensor
    """(n, dim) of the table's dtype"""


class TablesByName(TableOwner):
    """A module whose tables have names. Of tables that ranks share, all of them call what reads or writes
    rows here, unless it is ``local``."""

    def table(self, name: str) -> LiveTable:
        """Return the live table of that name."""
        try:
            return self._owned[name]
        except (KeyError, TypeError):
            raise TableError(
                f"There is no table {name!r}; there are {', '.join(map(repr, self._owned))}."
            ) from None

    @property
    def tables(self) -> dict[str, Table]:
        """Descriptions of the tables, by name."""
        return {name: table.spec for name, table in self._owned.items()}

    def parameter(self, name: str) -> nn.Parameter:
        """Return the handle of a table, for parameter groups.

        ``[{"params": [c.parameter("item")], "lr": .1}]`` is such a group. Where rows are kept by id (dynamic
        tables, tiers, ranks), its ``shape`` only says that there is room for any id: ``(2**37, dim)``, of no
        memory. ``numel()`` counts rows that are stored.
        """
        return self.table(name).parameter

    # After hotbed.distribute these are called by all ranks, or are ``local``.

    def _table(self, name: str, kind: str, local: bool) -> LiveTable:
        """`kind`: what all ranks are about to do, unless this one is `local`."""
        with (ALONE if local else next(iter(self._owned.values())).place.ranks).reporting(kind):
            return self.table(name)

    def rows(self, name: str, *, local: bool = False) -> Rows:
        """Return a copy of all rows of a table: (ids (n,) rising, values (n, dim)).

        Of tables that ranks share, all ranks call this, and each gets all rows.

        Args:
            local: only those that this rank keeps; the others need not call it.

        Raises:
            TableError: the copy would not fit in memory.
        """
        table = self._table(name, "a copy of rows", local)
        return Rows(*(local_rows(table) if local else table.all_rows()))

    def count(self, name: str | None = None, *, local: bool = False) -> int:
        """Rows that a table holds, or all tables together. `local`: as for `rows`."""
        named = None if name is None else self._table(name, "a count of rows", local)
        tables = [*self._owned.values()] if named is None else [named]
        return sum(local_count(table) if local else table.place.count() for table in tables)

    def lookup(
        self, name: str, ids: object, *, missing: Missing = "initial", local: bool = False
    ) -> Tensor:
        """Return the (n, dim) rows of (n,) ids (a tensor, an array, a list), and store nothing.

        Of tables that ranks share, all ranks call it, each with ids of its own. Text has the ids that the
        loader gave it: `hotbed.data.hash_ids`, or `hotbed.data.criteo_ids` for those of a `CriteoLog`.

        Args:
            missing: ``"initial"``: an id without a row reads its first value; ``"error"``: it is an IdError.
            local: all ids are kept by this rank; the others need not call it.

        Raises:
            IdError, InputError: ids that cannot be looked up.
        """
        table = self._table(name, "a lookup of rows", local)
        return local_lookup(table, ids, missing) if local else table.lookup(ids, missing)

    def contains(self, name: str, ids: object, *, local: bool = False) -> Tensor:
        """Return (n,) bool on the host: True for each of (n,) ids (a tensor, an array, a list) with a row.

        In a static table these are all ids in [0, rows). Of tables that ranks share, all ranks call it, each
        with ids of its own.

        Args:
            local: whether this rank keeps the row, or columns of it; the others need not call it.

        Raises:
            InputError: no ids.
        """
        table = self._table(name, "a search for ids", local)
        return (local_contains if local else LiveTable.contains)(table, ids)

    def assign(self, name: str, ids: object, values: object, *, local: bool = False) -> None:
        """Write (n, dim) values into the rows of (n,) ids; in a dynamic table, absent ids get a row.
        Both may be tensors, NumPy arrays or lists. Of tables that ranks share, all ranks call it, each with
        rows of its own; of an id that several give, those of the last rank stay.

        Args:
            local: only rows that this rank keeps are written, and the others passed over; they need not
                call it. Not of a replicated table.

        Raises:
            IdError, InputError, TableError, OutOfMemory: with the table as it was.
            StorageError: a tier below could not be read or written; some rows may be written, each of
                them whole.
        """
        table = self._table(name, "an assignment", local)
        (local_assign if local else LiveTable.assign)(table, ids, values)

    def erase(self, name: str, ids: object, *, local: bool = False) -> int:
        """Forget the rows of (n,) ids (a tensor, an array, a list), optimizer states included.

        A dynamic table loses the rows; ids without a row are passed over. Rows of a static table go back to
        their first values, as if no batch had had them. An id that comes again is a new one. Call it between
        steps: after ``step()`` and ``zero_grad()``, before the next forward. Of tables that ranks share, all
        ranks call it, each with ids of its own. `hotbed.erase` does it in all tables that have an id; states
        of torch's own optimizers stay.

        Args:
            local: only rows that this rank keeps go; the others need not call it. Not of a replicated
                table.

        Returns:
            How many rows went; of a static table, how many ids there were.

        Raises:
            IdError, InputError: ids that cannot be looked up.
            TableError: a gradient waits for its step.
            StorageError: a tier could not be written.
        """
        table = self._table(name, "a deletion of rows", local)
        return (local_erase if local else LiveTable.erase)(table, ids)

    def memory(self) -> dict[str, dict[str, int]]:
        """Per table: rows, bytes of weights, states and index, and in total what they take of memory:
        whole pages, of states only those that a step has touched. In tiers weights and states are of rows
        wherever they lie, and the total is the table's part, by its rows, of what the tiers take of memory.

        Vectors and gradients of batches are not in it. Their blocks, of at most 4 GiB while no batch has
        them, are kept for later batches, until these have long used others, memory is short, an optimizer is
        made, a checkpoint is saved, or a table is deleted.
        """
        return {name: table.memory() for name, table in self._owned.items()}
