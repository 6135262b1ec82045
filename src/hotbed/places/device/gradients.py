"""Gradients of tables on a device: the terms that backward left, summed when somebody wants rows.

An optimizer sums them while it updates, so gradient rows are neither written nor read. Whoever looks
at ``handle.grad`` gets them as a sparse COO tensor over slots. Only the device knows how many slots
a batch has, so the tensor has room for all positions; entries behind the last are zeros, at a slot
that the batch uses (-1 if it uses none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import OptimizerError
from hotbed.ops.gpu.ids import Array, check_arrays
from hotbed.ops.gpu.pool import FeatureSlots
from hotbed.ops.gpu.reduce import reduce
from hotbed.ops.gpu.table_kernels import TableKernels
from hotbed.ops.gpu.terms import Terms
from hotbed.places.device.deferred_errors import DeferredError, ReportedGradient
from hotbed.places.device.planes import there
from hotbed.table.gradients import GradientShare
from hotbed.table.lookups import StoredTable
from hotbed.table.sparse_gradient import TableGradient, by_rows, stored_gradient

__all__ = [
    "BatchGradient",
    "DeviceGradient",
    "GradientSource",
    "DeviceGradientRows",
    "gather",
    "gradient_rows_of",
    "sources_of",
]


@dataclass(frozen=True, eq=False)
class GradientSource:
    """The batch that a gradient comes from.

    Args:
        good: (1,) int32: whether its ids and offsets were. None: the host has checked them.
        notice: tells the host of bad ones.
        claim: keeps its tiered rows in their slots.
    """

    good: Tensor | None = None
    notice: DeferredError | None = None
    claim: _core.Claim | None = None
    written: tuple[tuple[_core.Table, Tensor], ...] | None = None
    """The core's tables and the slots, on the host, that a step writes; None: all of the claim's."""

    def mark_written(self) -> None:
        """A step was taken with this gradient."""
        if self.claim is None:
            return
        if self.written is None:
            self.claim.mark_dirty()
        else:
            for table, slots in self.written:
                _core.mark_written(table, slots.data_ptr(), len(slots))


@dataclass(eq=False)
class BatchGradient:
    """Gradient of one backward for the tables of one lookup.

    Args:
        tables: those of the lookup.
        terms: of all of them.
        weights: per-sample weights by which terms are multiplied, and the tables that they are for.
    """

    tables: tuple[StoredTable, ...]
    terms: Terms
    source: GradientSource
    weights: tuple[tuple[int, Tensor], ...] = ()
    versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = tuple(grad._version for grad in self.terms.grads)

    def check_unchanged(self) -> None:
        """Raises OptimizerError where somebody has written into what is still to be summed."""
        now = tuple(grad._version for grad in self.terms.grads)
        if now != self.versions:
            raise OptimizerError(
                f"The gradient of vectors of table {self.tables[0].name!r} was changed in place between "
                "backward and step. Change a copy of it, or the handle's grad."
            )


@dataclass(frozen=True, eq=False)
class DeviceGradientRows:
    """One table's share of what a backward left."""

    gradient: BatchGradient
    table: int
    """Its position among the gradient's tables."""

    @property
    def source(self) -> GradientSource:
        return self.gradient.source

    def rows(self) -> tuple[Tensor, Tensor]:
        """(n,) slots and (n, dim) float32 rows; behind the last, slots are -1 and rows zeros."""
        self.gradient.check_unchanged()
        return _rows_of_terms(self.gradient.terms, self.table)

    def slots(self) -> Tensor:
        """Slots of the rows, (n,) int64 on the host; waits for the device."""
        slots = self.rows()[0].cpu()
        return slots[slots >= 0]

    def coo(self, handle: Tensor) -> TableGradient:
        """The same as the gradient of the table's handle."""
        return _coo(handle, *self.rows(), [self.source])


def gradient_rows_of(live: StoredTable) -> DeviceGradientRows | None:
    """Return the rows of the last backward, if they are all of the table's gradient."""
    if len(live.waiting.shares) == 1 and stored_gradient(live.parameter) is None:
        return _shares_of(live)[0]
    return None


class DeviceGradient(ReportedGradient):
    """Gradients that wait for the step of a table on a device."""

    def zero(self, handle: Tensor) -> None:
        """Without summing it."""
        if self.shares:
            self.drop(handle)
        else:
            super().zero(handle)

    def _total(self, handle: Tensor, stored: Tensor | None, shares: list[GradientShare]) -> Tensor:
        live: StoredTable = vars(handle)["hotbed_table"]
        share = gradient_rows_of(live)
        if share is not None:
            return share.coo(handle)
        terms, _ = gather([live])
        return _coo(handle, *_rows_of_terms(terms, 0), sources_of(live))


def sources_of(live: StoredTable) -> list[GradientSource]:
    """Return the batches that the gradient of a table comes from, as far as they are known."""
    known = live.waiting.sources_of(live.parameter)
    return [source for source in known if isinstance(source, GradientSource)]


def changed_slots(live: StoredTable, share: DeviceGradientRows | None) -> Tensor:
    """Return the slots of the rows that a step changes, (n,) int64 on the host; waits for the device.

    Args:
        share: the gradient, where that is not the handle's.
    """
    slots = [one.slots() for one in ([share] if share is not None else _shares_of(live))]
    if share is None and (stored := stored_gradient(live.parameter)) is not None:
        slots.append(_rows_of_stored(stored, live, [])[0].cpu())
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    changed: Tensor = torch.unique(torch.cat([none, *slots]))
    return changed


def _shares_of(live: StoredTable) -> list[DeviceGradientRows]:
    shares = []
    for share in live.waiting.shares:
        assert isinstance(share, DeviceGradientRows)
        shares.append(share)
    return shares


def gather(tables: Sequence[StoredTable]) -> tuple[Terms, list[Tensor]]:
    """One set of terms of all that the gradients of tables are made of.

    Returns:
        terms, table by table; and (1,) int32 flags that tell whether the slots of gradients which
        others have put there are slots of their tables.
    """
    features: list[FeatureSlots] = []
    grads: list[Tensor] = []
    flags: list[Tensor] = []
    for t, live in enumerate(tables):
        parts = [share.rows() for share in _shares_of(live)]
        stored = stored_gradient(live.parameter)
        if stored is not None:
            slots, rows = _rows_of_stored(stored, live, flags)
            parts.insert(0, (slots, rows))
        feature = FeatureSlots(
            table=t,
            slots=torch.cat([slots for slots, _ in parts]),
            combiner="none",
            padding_slot=there(live).padding_slot,
        )
        features.append(feature)
        grads.append(torch.cat([rows for _, rows in parts]))
    kernels = TableKernels([there(live).planes() for live in tables])
    return kernels.terms(kernels.transpose(features), features, grads), flags


def _rows_of_terms(terms: Terms, table: int) -> tuple[Tensor, Tensor]:
    """(n,) slots and (n, dim) rows; behind the last, slots are -1 and rows zeros."""
    (rows,) = reduce(terms, None, [table])
    index = terms.index
    at = torch.arange(rows.shape[0], device=rows.device)
    begin, end = index.table_starts[table], index.table_starts[table + 1]
    there = at < end - begin
    if not len(index.slots):
        return torch.full_like(at, -1), torch.zeros_like(rows)
    slots = index.slots[(begin + at).clamp_(max=len(index.slots) - 1)]
    # torch.where would bring its number to the device, and wait.
    behind = ~there
    return slots.masked_fill(behind, -1), rows.masked_fill(behind[:, None], 0.0)


def _coo(
    handle: Tensor, slots: Tensor, rows: Tensor, sources: list[GradientSource]
) -> TableGradient:
    if len(slots):
        slots = torch.where(slots < 0, slots[0], slots)
    return TableGradient.over(slots, rows, handle.shape, sources)


def _rows_of_stored(grad: Tensor, live: StoredTable, flags: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(slots, rows) of a gradient that autograd or the user has put there; a flag of its slots."""
    rows = there(live)
    if grad.device.type != rows.device.type:
        raise OptimizerError(
            f"Table {live.name!r} lies on {rows.device} and its gradient on {grad.device}: it was moved "
            "in between. Call zero_grad() after moving a model."
        )
    if grad.is_sparse and grad.sparse_dim() == 2:
        grad = by_rows(grad)
    sources = live.waiting.sources_of(live.parameter)
    slots = live.place.slots_of(grad, sources).contiguous()
    values = (grad._values() if grad.is_sparse else grad).float().contiguous()
    if not len(slots) or not grad.is_sparse:
        return slots, values
    (checked,), _, good = check_arrays([(Array.SLOTS, slots, rows.slots)])
    flags.append(good)
    return checked, values
