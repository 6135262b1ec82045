"""A live table: its rows as they are seen from outside."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hotbed.table import checks
from hotbed.table.backward import Changes
from hotbed.table.copies import copied, pickled
from hotbed.table.locks import alone, reading
from hotbed.table.lookups import records_of
from hotbed.table.records import Records
from hotbed.table.with_handle import TableWithHandle

__all__ = ["LiveTable", "live_table"]

_ROWS_AT_ONCE = 1 << 20

_CPU = torch.device("cpu")


class LiveTable(TableWithHandle):
    """One table with its memory, and its rows as they are seen from outside."""

    # -- rows ------------------------------------------------------------------------------------

    def weights(self) -> Tensor:
        """(rows, dim) the weight plane itself, by slot; valid until rows come or go."""
        return self.place.weights()

    def ids(self) -> Tensor:
        """(rows,) int64 the ids of the rows, those of a plane by slot; of a dynamic table valid until
        rows come or go."""
        if self.spec.rows is not None:
            return self.place.ids()
        with reading([self]):
            return self.place.ids()

    def stored_ids(self) -> Tensor:
        """(n,) int64, rising: ids whose rows are stored. A tiered static table stores those that a
        batch or an assignment has touched; the others are their first values."""
        with reading([self]):
            return self.core.stored_ids()

    def id_of(self, slot: int) -> int:
        """The id of the row in a slot; of a part, that in the whole table."""
        return int(self.spec.origin.ids_in_table(self.core.id_of(slot)))

    def bring_up_to_date(self) -> None:
        """Writes what the rows of a static table missed while no batch touched them."""
        if not self.follows:
            return
        with alone([self]):
            self.place.changing("catch up")
            for begin in range(0, len(self), _ROWS_AT_ONCE):
                slots = torch.arange(begin, min(begin + _ROWS_AT_ONCE, len(self)), device="cpu")
                self.held_rule.catch_up(slots.data_ptr(), len(slots))

    def current_weights(self) -> Tensor:
        """(rows, dim) weights of a static table: the plane, or a copy where there is none that is up to
        date."""
        with reading([self]):
            self.raise_deferred()
            if self.parameter.is_current:
                return self.place.weights()
            found = self.place.all_rows()
            assert found is not None
            return found[1]

    def lookup(self, ids: object, missing: checks.Missing = "initial") -> Tensor:
        """(n, dim) rows of the ids as they are; see `EmbeddingCollection.lookup`."""
        wanted = ids.device if isinstance(ids, Tensor) else _CPU
        with self.place.ranks.reporting("a lookup of rows"):
            self.ready()
            own = checks.checked_ids(self.spec, ids)
            with reading([self]):
                self.raise_deferred()
                if checks.checked_missing(missing):
                    found = self.place.contains(own)
                    with self.place.ranks.reporting("a lookup of rows"):
                        checks.refuse_absent(self.spec, own, found)
                return self.place.read(own).to(wanted)

    def contains(self, ids: object) -> Tensor:
        """(n,) bool: which of the ids have a row; see `EmbeddingCollection.contains`."""
        with self.place.ranks.reporting("a search for ids"):
            own = checks.any_ids(self.spec, ids)
            with reading([self]):
                self.raise_deferred()
                return self.place.contains(own)

    def assign(self, ids: object, values: object) -> None:
        """Writes rows; ids of a dynamic table that have none get one. Of duplicates the last wins.

        Raises:
            IdError, InputError, TableError, OutOfMemory: with the table as it was.
            StorageError: a tier below could not be read or written; some rows may be written, each of
                them whole.
        """
        with self.place.ranks.reporting("an assignment"):
            self.ready()
            own = checks.checked_ids(self.spec, ids)
            rows = checks.checked_rows(self.spec, own, values)
            with alone([self]):
                self.raise_deferred()
                if len(own) or self.place.ranks.size > 1:  # others may have some
                    self.place.changing("write", ids=lambda: own)
                self.place.assign(own, rows)

    def write(self, records: Records) -> None:
        """As `hotbed.table.place.Place.write`, while the table is held alone."""
        kind: Changes = "states" if records.weights is None else "write"
        self.place.changing(kind, ids=lambda: records.ids)
        self.place.write(records)

    def all_rows(self) -> tuple[Tensor, Tensor]:
        """A copy of all rows as the last step has left them: ids (n,), rising, and weights (n, dim).

        Raises:
            TableError: it would not fit in memory.
        """
        found = self.rows_of_all("rows", everywhere=True)
        assert found is not None
        return found

    def rows_of_all(self, purpose: str, *, everywhere: bool) -> tuple[Tensor, Tensor] | None:
        """The same; of a table that ranks share on all of them, or else on the first only."""
        self.place.refuse_copy_beyond_memory(purpose)
        with reading([self]):
            self.raise_deferred()
            return self.place.all_rows(everywhere=everywhere)

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        """All stored rows, chunk by chunk, as of one step; see `hotbed.table.place.Place.records`. Until
        it is exhausted or closed, what would change rows waits, or is refused in this thread."""
        return (rows for _, rows in records_of([self], states=states, current=current))

    def erase(self, ids: object) -> int:
        """Forgets rows; see `EmbeddingCollection.erase`."""
        with self.place.ranks.reporting("a deletion of rows"):
            self.ready()
            own = torch.unique(checks.checked_ids(self.spec, ids))
            with alone([self]):
                self.raise_deferred()
                checks.refuse_to_erase(self.spec, self.has_gradient)
                self.generation += 1
                self.place.changing("erase", ids=lambda: own)
                return self.place.erase(own)

    def draw_again(self, key: int) -> None:
        """Gives every row its first value under a new key, rank 0's; a dynamic table forgets its rows."""
        self.raise_deferred()
        self.set_key(int(self.place.ranks.values_of_all("a reset of rows", str(key))[0]))
        self.forget_rows()

    def forget_rows(self) -> None:
        """Every row is its first value again; a dynamic table is empty. If slots get other ids with
        it, the gradient goes too."""
        self.allocate()
        with alone([self]):
            self.raise_deferred()
            if self.spec.rows is None:
                self.generation += 1
                self.drop_gradient()
            self.place.changing("forget")
            self.place.forget()

    def set_key(self, key: int) -> None:
        """Rows that are stored stay as they are."""
        with alone([self]):
            self.place.set_key(key)

    def memory(self) -> dict[str, int]:
        """Bytes of this table by what they hold; in tiers, but for the total, of rows wherever they lie."""
        self.allocate()
        return self.place.memory()

    # -- moving and copying ----------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> LiveTable:
        """A second table with the same rows and key, without optimizer or gradient."""
        return copied(self, memo)

    def __reduce__(self) -> tuple[object, ...]:
        return pickled(self)


def live_table(parameter: object) -> LiveTable | None:
    """The table behind a handle, or None for an ordinary parameter."""
    return getattr(parameter, "hotbed_table", None)
