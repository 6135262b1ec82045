"""Where the rows of a table lie: the type that every place has."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hotbed import _core
from hotbed.table.lookups import Lookups
from hotbed.table.protocols import HandleOfTable, LocalShards, Relocation, RowCopies, StepState
from hotbed.tables import Table

__all__ = ["ON_HOST", "Place"]

Changes = Literal["step", "fused", "catch up", "write", "erase", "forget", "move", "handle"]

ON_HOST = "host"
"""Rows that the core computes on take their step together."""


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
        aliased: whether the data of the handle are the rows.
        rows_move: whether a row may have another slot with the next batch.
        stepped: tables of equal ones take their step together.
        unscales: whether its steps take out what a GradScaler has put into gradients.
        recorded_on: the device on which a step over its rows can become a graph; None: it cannot.
    """

    stepped: Any = ON_HOST
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
        self.device, self.ranks, self.tiers = lookups.device, lookups.ranks, lookups.tiers
        self.changed = False

    def join(self, live: Any) -> None:
        """Attach the table that lives here; called once."""

    # -- the barrier -----------------------------------------------------------------------------

    def changing(
        self, kind: Changes, *, ids: Tensor | None = None, slots: Tensor | None = None
    ) -> None:
        """Note that rows are about to change; called by whoever has the table alone.

        For a place that keeps something of them elsewhere. (A step may still be refused by a device, and
        leave them as they were.)

        Args:
            kind: what changes them; "handle": somebody has written through the parameter, and it is
                told as soon as it shows.
            ids: (n,) int64, on the host, of the rows;
            slots: or their slots; neither: any row may change.
        """
        self.changed = True
