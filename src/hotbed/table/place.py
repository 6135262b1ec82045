"""Where the rows of a table lie: the type that every place has."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from hotbed import _core
from hotbed.table.backward import Changes
from hotbed.table.lookups import Lookups, StoredTable, TiersOfTable
from hotbed.table.protocols import (
    HandleOfTable,
    LocalShards,
    RowCopies,
    StepState,
    TableInPlace,
)
from hotbed.tables import Table

__all__ = ["ON_HOST", "MovedTable", "Place", "Relocation"]

_SAME_VALUES = "catch up", "states", "move"
"""Kinds of changes after which every row reads as before."""
ON_HOST = "host"
"""Rows that the core computes on take their step together."""


class MovedTable(StoredTable, Protocol):
    """A live table whose rows can come to lie elsewhere."""

    generation: int

    @property
    def place(self) -> Place: ...

    def adopt(self, place: Place) -> None:
        """Rows lie elsewhere from now on."""


class Relocation(TableInPlace):
    """How rows come to lie elsewhere."""

    def refuse_to_share(self) -> None:
        """Raises TableError where its rows cannot be handed out to ranks."""

    def give_up(self, live: MovedTable) -> None:
        """Its rows will lie elsewhere."""
        self.core.release_rows()

    @abc.abstractmethod
    def for_copy(
        self, memo: dict[int, object] | None
    ) -> tuple[Callable[[Table, int], Place], Callable[[MovedTable], None] | None]:
        """Return the factory for the place of a copy, and a function that brings it to where it belongs when
        it has its rows. `memo`: of deepcopy; None: both are to be pickled.

        Raises:
            TableError: there cannot be one.
        """

    @abc.abstractmethod
    def refuse_device(self, device: torch.device, by_kernels: ModuleType) -> None:
        """Raises TableError where its rows cannot lie on a device, whatever its memory. `by_kernels`: the
        places there."""

    @abc.abstractmethod
    def move_to_device(
        self, live: MovedTable, device: torch.device, by_kernels: ModuleType
    ) -> None:
        """Brings rows and states to a device, and has the table adopt its new place.

        Raises:
            TableError, OutOfMemory: they cannot lie there; all is as it was.
        """

    def move_to_host(self, live: MovedTable) -> None:
        """The way back, if they lie elsewhere."""


class Place(HandleOfTable, RowCopies, LocalShards, StepState, Relocation):
    """Where the rows of one table lie, and all that depends on it.

    Ids that it is given are (n,) int64 on the host, and were checked.

    Attributes:
        core: the compiled table: its name, its rule, first values; in some places the rows.
        spec: what the table was made from.
        budget: what rows in the core's memory share with others; None: all that there is.
        lookups: what it has in common with the tables that can be looked up in one call with its own.
        device: where vectors come out.
        ranks: the processes that share its table.
        tiers: those that its rows lie in, or will lie in (`hotbed.places.tiered.tiers.Tiers`); or None.
        changed: whether rows may be others than their first values.
        writes: times that they may have become others than they were.
        rewrites: those of them that were no steps, and new optimizers, whose steps may move other rows.
        aliased: whether the data of the handle are the rows.
        rows_move: whether a row may have another slot with the next batch.
        unscales: whether its steps take out what a GradScaler has put into gradients.
        recorded_on: the device on which a step over its rows can become a graph; None: it cannot.
    """

    unscales = False
    recorded_on: torch.device | None = None

    def __init__(
        self,
        core: _core.Table,
        spec: Table,
        lookups: Lookups,
        budget: _core.MemoryBudget | None = None,
    ) -> None:
        self.core, self.spec, self.budget = core, spec, budget
        self.lookups = lookups
        self.device, self.ranks = lookups.device, lookups.ranks
        self.tiers: TiersOfTable | None = lookups.tiers
        self.changed, self.writes, self.rewrites = False, 0, 0

    @property
    def stepped_with(self) -> Hashable:
        """Tables of equal ones take their step together."""
        return ON_HOST

    def join(self, live: MovedTable) -> None:
        """Attach the table that lives here; called once."""

    # -- the barrier -----------------------------------------------------------------------------

    def changing(
        self,
        kind: Changes,
        *,
        ids: Callable[[], Tensor] | None = None,
        slots: Callable[[], Tensor] | None = None,
    ) -> None:
        """Note that rows are about to change; called by whoever has the table alone.

        For a place that keeps something of them elsewhere. (A step may still be refused by a device, and
        leave them as they were.)

        Args:
            kind: what changes them; "states": an optimizer's alone; "handle": somebody has written through
                the parameter, and it is told as soon as it shows.
            ids: gives the ids of these rows, (n,) int64 on the host, while the table is held;
            slots: or their slots. Neither: any row may change.
        """
        self.changed = True
        if self.core.in_snapshot:
            self.core.wait_for_snapshot(ids is None and slots is None and kind != "handle")
        if ids is None and slots is None and kind != "catch up":  # the core sees to the others
            self.core.forget_changes()
        if kind not in _SAME_VALUES:
            self.writes += 1
            self.rewrites += kind != "step"
