"""The one lookup path: check, resolve, pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hotbed import _core, trace
from hotbed.group.pool import pool
from hotbed.inputs.bags import Bags
from hotbed.places.host.batch import HostBatch
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call, StoredTable, lookups_of
from hotbed.table.resolved import Resolved

__all__ = ["looked_up", "lookup"]

T = TypeVar("T")


def lookup(
    live: Sequence[LiveTable],
    handles: Sequence[Tensor],
    table_of: Sequence[int],
    names: Sequence[str],
    bags: Sequence[Bags],
    training: bool,
) -> list[Tensor]:
    """Resolves and pools one batch: the one path of every module.

    Args:
        live: the tables.
        handles: of these.
        table_of: for each feature, the position of its table in `live`.
        names: of the features, for errors.
        bags: the features' inputs.
        training: whether ids that a dynamic table has not met get rows; only where gradients are
            enabled, and not in a table whose parameter requires none.

    Raises:
        IdError, InputError, OutOfMemory, StorageError: before anything has changed.
        OptimizerError: a gradient of a table was left behind by an earlier step.
        TableError: a table is half loaded.
    """
    training = training and torch.is_grad_enabled()
    frozen, behind = [], []
    for t, (table, handle) in enumerate(zip(live, handles, strict=True)):
        if not handle.requires_grad:
            frozen.append(t)
        if handle.data_ptr() != table.address:
            table.check_handle()
        if training and table.follows:
            behind.append(table)
        if table.complaint is not None and training:
            complaint, table.complaint = table.complaint, None
            raise complaint
    call = Call(live, table_of, names, bags, frozen, training)
    return _resolved(call, behind, lambda resolved: pool(resolved, handles))


def looked_up(call: Call, places: _core.VectorPlaces | None) -> HostBatch:
    """Resolve a batch that others ask for, of tables in the core's memory, for a backward that somebody else
    calls.

    Args:
        places: where the vectors of each feature go, in the compute dtype. None: no rows are wanted.
    """
    behind = [table for table in call.live if call.training and table.follows]

    def write(resolved: Resolved) -> HostBatch:
        assert isinstance(resolved, HostBatch)
        if places is not None:
            resolved.write(places)
        return resolved

    return _resolved(call, behind, write)


def _ids_of(call: Call, table: StoredTable) -> Tensor:
    """Return the ids that a call asks a table for, (n,) int64 on the host."""
    return torch.cat(
        [
            bags.ids.reshape(-1).to("cpu", torch.int64)
            for bags, t in zip(call.bags, call.table_of, strict=True)
            if call.live[t] is table
        ]
    )


def _resolved(call: Call, behind: Sequence[StoredTable], pooled: Callable[[Resolved], T]) -> T:
    """`behind`: tables some of whose rows may be. `pooled`: what is done while rows stay."""
    live, training = call.live, call.training
    while True:
        lookups = live[0].place.lookups
        if not lookups.is_immediate:
            lookups.allocate(live)
        with _core.Hold.of_forward([table.core for table in live], training) as hold:
            lookups = live[0].place.lookups  # another thread may have moved the tables until now
            for table in live:
                if table.failed_load:
                    table.refuse_half_loaded()
                if table.place.lookups is not lookups:
                    lookups_of(live)
            if not lookups.is_immediate:
                if not lookups.are_allocated(live):
                    continue  # an optimizer was made just now
                lookups.raise_deferred(live, training=training)
            for table in behind:
                table.place.changing("catch up", ids=functools.partial(_ids_of, call, table))
            resolved = lookups.resolve(call)
            hold.share()
            with trace.span("pool"):
                return pooled(resolved)
