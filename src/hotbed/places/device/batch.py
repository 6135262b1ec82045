"""Batches of tables on a device: checked, pooled and summed there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed import trace
from hotbed.errors import HotbedError
from hotbed.inputs.bags import Bags, input_fault
from hotbed.ops.gpu.ids import GOOD, Array, check_arrays
from hotbed.ops.gpu.pool import FeatureSlots
from hotbed.ops.gpu.recording import use
from hotbed.ops.gpu.table_kernels import DeviceBatch, TableKernels
from hotbed.ops.gpu.transpose import TransposedIndex
from hotbed.places.device.deferred_errors import DeferredError
from hotbed.places.device.gradients import BatchGradient, DeviceGradientRows, GradientSource
from hotbed.places.device.inputs import bring, bring_weights
from hotbed.places.device.planes import there
from hotbed.places.device.step import step_in_backward
from hotbed.places.host.batch import check, core_batch
from hotbed.table.backward import Update
from hotbed.table.lookups import Call, StoredTable
from hotbed.table.resolved import Columns, PooledTable

__all__ = ["BatchSource", "DeviceResolved", "resolve_whole"]


def resolve_whole(
    call: Call, device: torch.device, is_here: Callable[[Tensor], bool]
) -> DeviceResolved:
    """A batch of tables that lie on one device whole: an id is its slot.

    Raises:
        IdError, InputError: of this batch, where its ids are on the host.
    """
    use(call.live)
    with trace.span("resolve"):
        features, weights, source = _resolve(call, device, is_here)
    return DeviceResolved(call, device, weights, features, _Whole(source))


def _out_dtype(device: torch.device) -> torch.dtype:
    if torch.is_autocast_enabled(device.type):
        wanted: torch.dtype = torch.get_autocast_dtype(device.type)
        return wanted
    return torch.float32


# -- resolve -------------------------------------------------------------------------------------


def _resolve(
    call: Call, device: torch.device, is_here: Callable[[Tensor], bool]
) -> tuple[list[FeatureSlots], list[Tensor | None], GradientSource]:
    """The batch over slots, its weights as autograd knows them, and where it comes from."""
    live, table_of, names, bags, _, _ = call
    on_host = [f for f, bag in enumerate(bags) if not is_here(bag.ids)]
    if on_host:
        bags = [_offsets_by_ids(bag) if f in on_host else bag for f, bag in enumerate(bags)]
        _check_on_host(call._replace(bags=bags), on_host)
    moved = bring([(bag.ids, bag.offsets) for bag in bags], device)
    arrays: list[tuple[Array, Tensor, int]] = []
    of: list[tuple[int, Array]] = []
    for f, (ids, offsets) in enumerate(moved):
        if f in on_host:
            continue
        rows = live[table_of[f]].spec.rows
        assert rows is not None
        arrays.append((Array.IDS, ids, rows))
        of.append((f, Array.IDS))
        if offsets is not None:
            arrays.append((Array.OFFSETS, offsets, ids.shape[0]))
            of.append((f, Array.OFFSETS))
    source = GradientSource()
    if arrays:
        checked, reported, good = check_arrays(arrays)
        for (f, kind), array in zip(of, checked, strict=True):
            ids, offsets = moved[f]
            moved[f] = (array, offsets) if kind == Array.IDS else (ids, array)
        given = [(f, kind, array) for (f, kind), (_, array, _) in zip(of, arrays, strict=True)]
        faults = _Faults(list(live), list(table_of), list(names), list(bags), given)
        source = GradientSource(
            good, DeferredError(reported, faults.first, live[0], reader=not torch.is_grad_enabled())
        )
    weights = [bring_weights(bag.weights, device) for bag in bags]
    features = []
    for t, bag, (ids, offsets), weight in zip(table_of, bags, moved, weights, strict=True):
        combiner = live[t].spec.combiner or "none"
        unpooled = combiner == "none"
        if not unpooled and offsets is None and bag.fixed == 0:  # bags, all of them empty
            offsets = torch.zeros(bag.bags + 1, dtype=torch.int64, device=device)
        feature = FeatureSlots(
            table=t,
            slots=ids.long(),
            combiner=combiner,
            offsets=None if unpooled else offsets,
            fixed=1 if unpooled else max(bag.fixed, 1),
            weights=None if weight is None else weight.detach(),
            padding_slot=there(live[t]).padding_slot,
        )
        features.append(feature)
    return features, weights, source


def _offsets_by_ids(bag: Bags) -> Bags:
    offsets = bag.offsets
    return bag if offsets is None else bag._replace(offsets=offsets.to(bag.ids.device))


def _check_on_host(call: Call, wanted: Sequence[int]) -> None:
    """Raises where ids or offsets of the features `wanted` are bad."""
    part = call._replace(
        table_of=[call.table_of[f] for f in wanted],
        names=[call.names[f] for f in wanted],
        bags=[call.bags[f] for f in wanted],
    )
    check(core_batch(call.live, part.table_of, part.bags), part)


@dataclasses.dataclass
class _Faults:
    """Finds words for what the device found bad in a batch."""

    live: list[StoredTable]
    table_of: list[int]
    names: list[str]
    bags: list[Bags]
    arrays: list[tuple[int, Array, Tensor]]

    def first(self, reported: list[int]) -> HotbedError | None:
        if reported[0]:
            return None
        for (f, kind, array), at in zip(self.arrays, reported[1:], strict=True):
            if at == GOOD:
                continue
            bag, table = self.bags[f], self.live[self.table_of[f]]
            around = array[max(at - 1, 0) : at + 1].tolist()
            value = around[-1]
            if kind == Array.OFFSETS:
                fault, place, bound = 4, 0, bag.ids.shape[0]
                if at == 0 and value:
                    fault = 2
                elif at and value < around[0]:
                    fault, place, bound = 3, at - 1, around[0]
            else:
                assert table.spec.rows is not None
                fault, bound = 1, table.spec.rows
                place = at // max(bag.fixed, 1)
                if bag.offsets is not None:
                    place = int(torch.searchsorted(bag.offsets.cpu(), at, right=True)) - 1
            return input_fault(fault, table.name, self.names[f], bag, place, value, bound)
        return None


# -- pool ----------------------------------------------------------------------------------------


class BatchSource(Protocol):
    """Where a batch comes from."""

    @property
    def gradient_source(self) -> GradientSource: ...

    def index(self) -> TransposedIndex | None:
        """Return the transposed index for backward; None: it is built on the device."""


@dataclasses.dataclass(eq=False)
class _Whole:
    """Where a batch of whole tables comes from."""

    gradient_source: GradientSource

    def index(self) -> None:
        """None: the transposed index is built on the device."""


class DeviceResolved:
    """`hotbed.table.resolved.Resolved`, by kernels."""

    wants_gradient = True
    has_own_rows = False

    def __init__(
        self,
        call: Call,
        device: torch.device,
        weights: Sequence[Tensor | None],
        features: list[FeatureSlots],
        source: BatchSource,
    ) -> None:
        """`weights`: on the device, as autograd knows them. `source`: what backward asks for the index."""
        self.live, self.table_of, self.bags = call.live, call.table_of, call.bags
        self.weights = weights
        self.features, self.source = tuple(features), source
        self.device = device
        self.kernels = TableKernels([there(table).planes() for table in call.live])
        self.inverses: Sequence[Tensor | None] = ()
        self._dtype = _out_dtype(self.device)

    def dtype_of(self, table: PooledTable) -> torch.dtype:
        return self._dtype

    def empty(self, vectors: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((vectors, dim), dtype=dtype, device=self.device)

    def pool(self, columns: Sequence[Columns]) -> None:
        found: dict[int, Tensor] = {}
        for _, features, parts in columns:
            found.update(zip(features, parts, strict=True))
        outputs = [found[f] for f in range(len(self.features))]
        self.inverses = self.kernels.forward(self.features, self._dtype, outputs).inverses

    def keep_inputs(self) -> None:
        """Do nothing: inputs are kept anyway."""

    def backward(self, grads: Sequence[Tensor | None]) -> DevicePendingGradient:
        """Gradients become (bags, dim), all of one dtype, columns side by side."""
        dtypes = {grad.dtype for grad in grads if grad is not None}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            dtype = torch.float32
        flat: list[Tensor | None] = []
        for feature, grad in zip(self.features, grads, strict=True):
            if grad is not None:
                dim = self.kernels.dims[feature.table]
                grad = grad.reshape(-1, dim) if grad.dim() != 2 else grad
                grad = grad.to(dtype)
                if dim > 1 and grad.stride(1) != 1:
                    grad = grad.contiguous()
            flat.append(grad)
        return DevicePendingGradient(self, flat)

    def weight_gradients(
        self, left: DevicePendingGradient, outputs: dict[int, Tensor], wanted: Sequence[int]
    ) -> list[Tensor]:
        grads = [left.grads[f] for f in wanted]
        # Of bags that were not divided none is read.
        pooled = [outputs.get(f, left.grads[f]) for f in wanted]
        flat: list[Any] = [None if v is None else v.reshape(-1, v.shape[-1]) for v in pooled]
        batch = DeviceBatch(
            features=tuple(self.features[f] for f in wanted),
            outputs=flat,
            inverses=[self.inverses[f] for f in wanted],
        )
        found = self.kernels.weight_gradients(batch, grads)
        results = []
        for f, gradient in zip(wanted, found, strict=True):
            weights = self.features[f].weights
            assert weights is not None
            results.append(torch.zeros_like(weights) if gradient is None else gradient)
        return results


class DevicePendingGradient:
    """`hotbed.table.backward.PendingGradient`, which kernels sum by row as they update, or on demand."""

    def __init__(self, resolved: DeviceResolved, grads: list[Tensor | None]) -> None:
        """`grads`: (bags, dim) of each feature, of one dtype."""
        self._resolved, self.grads = resolved, grads

    @functools.cached_property
    def _gradient(self) -> BatchGradient:
        resolved = self._resolved
        features, source = resolved.features, resolved.source
        batch = DeviceBatch(features=features, outputs=[], inverses=list(resolved.inverses))
        terms = resolved.kernels.backward(batch, self.grads, source.index())
        weights = tuple(
            (feature.table, feature.weights)
            for feature, grad in zip(features, self.grads, strict=True)
            if grad is not None and feature.weights is not None
        )
        return BatchGradient(tuple(resolved.live), terms, source.gradient_source, weights)

    def step(self, updates: Sequence[Update]) -> None:
        step_in_backward(self._gradient, updates)

    def slots(self, table: int) -> Tensor:
        return DeviceGradientRows(self._gradient, table).slots()

    def shares(self, tables: Sequence[int]) -> list[DeviceGradientRows]:
        return [DeviceGradientRows(self._gradient, t) for t in tables]
