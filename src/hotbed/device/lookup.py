"""The lookup path of tables on a device: check, slots, pool, and what backward leaves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotbed import _core
from hotbed.device.gradients import BatchGradient, Origin, Share
from hotbed.device.inputs import bring, bring_weights
from hotbed.device.notices import Notice, raise_what_is_known
from hotbed.device.step import step_in_backward
from hotbed.errors import HotbedError, TableError
from hotbed.handles import LiveTable
from hotbed.holds import alone, together
from hotbed.inputs import Bags, core_input, input_fault
from hotbed.ops.gpu.ids import GOOD, Array, check_arrays
from hotbed.ops.gpu.lookup import DeviceBatch, Lookup
from hotbed.ops.gpu.pool import FeatureSlots
from hotbed.ops.gpu.recording import use
from hotbed.ops.pool import keeps_graph
from hotbed.resolve.outside_graphs import outside_graphs
from hotbed.trace import span

if TYPE_CHECKING:
    from hotbed.device.tiered import TieredBatch

__all__ = ["look_up", "pool_resolved", "raise_what_is_known"]

# As in hotbed.ops.pool: columns of a buffer that are no views of one another for autograd.
_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def look_up(
    live: Sequence[LiveTable],
    table_of: Sequence[int],
    names: Sequence[str],
    bags: Sequence[Bags],
) -> list[Tensor]:
    """As `hotbed.resolve.lookup.lookup`, of tables that lie on one device whole.

    Raises:
        IdError, InputError: of this batch, where its ids are on the host.
    """
    device = live[0].device_rows.device
    use(live)
    with span("resolve"):
        features, weights, origin = _resolve(live, table_of, names, bags, device)
    return _pool(live, features, weights, bags, _Source(origin))


def pool_resolved(
    batch: TieredBatch, live: Sequence[LiveTable], bags: Sequence[Bags]
) -> list[Tensor]:
    """Pools a batch of tables in tiers, which has its slots."""
    use(live)
    device = live[0].device_rows.device
    weights = [bring_weights(bag.weights, device) for bag in bags]
    with span("bring the batch"):
        features = batch.features(weights)
    return _pool(live, features, weights, bags, batch)


def _pool(
    live: Sequence[LiveTable],
    features: list[FeatureSlots],
    weights: Sequence[Tensor | None],
    bags: Sequence[Bags],
    source: _Source | TieredBatch,
) -> list[Tensor]:
    device = live[0].device_rows.device
    lookup = Lookup([table.device_rows.planes(table) for table in live])
    call = _Call(tuple(live), lookup, features, source, list(bags), _out_dtype(device))
    with span("pool"):
        if torch.is_grad_enabled():
            handles = [p if (p := t.parameter).requires_grad else None for t in live]
            given = [w for w in weights if w is not None]
            if any(h is not None for h in handles) or any(w.requires_grad for w in given):
                return list(_Pool.apply(call, *handles, *weights))  # type: ignore[no-untyped-call]
        return call.pool().outputs


def _out_dtype(device: torch.device) -> torch.dtype:
    if torch.is_autocast_enabled(device.type):
        wanted: torch.dtype = torch.get_autocast_dtype(device.type)
        return wanted
    return torch.float32


# -- resolve -------------------------------------------------------------------------------------


def _resolve(
    live: Sequence[LiveTable],
    table_of: Sequence[int],
    names: Sequence[str],
    bags: Sequence[Bags],
    device: torch.device,
) -> tuple[list[FeatureSlots], list[Tensor | None], Origin]:
    """The batch over slots, its weights as autograd knows them, and where it comes from."""
    on_host = [f for f, bag in enumerate(bags) if not live[0].device_rows.is_here(bag.ids)]
    if on_host:
        bags = [_offsets_by_ids(bag) if f in on_host else bag for f, bag in enumerate(bags)]
        _check_on_host(live, table_of, names, bags, on_host)
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
    origin = Origin()
    if arrays:
        checked, told, good = check_arrays(arrays)
        for (f, kind), array in zip(of, checked, strict=True):
            ids, offsets = moved[f]
            moved[f] = (array, offsets) if kind == Array.IDS else (ids, array)
        given = [(f, kind, array) for (f, kind), (_, array, _) in zip(of, arrays, strict=True)]
        faults = _Faults(list(live), list(table_of), list(names), list(bags), given)
        origin = Origin(
            good, Notice(told, faults.first, live[0], reader=not torch.is_grad_enabled())
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
            padding_slot=live[t].device_rows.padding_slot,
        )
        features.append(feature)
    return features, weights, origin


def _offsets_by_ids(bag: Bags) -> Bags:
    offsets = bag.offsets
    return bag if offsets is None else bag._replace(offsets=offsets.to(bag.ids.device))


def _check_on_host(
    live: Sequence[LiveTable],
    table_of: Sequence[int],
    names: Sequence[str],
    bags: Sequence[Bags],
    wanted: Sequence[int],
) -> None:
    inputs = [core_input(table_of[f], live[table_of[f]].combiner, bags[f]) for f in wanted]
    batch = _core.Batch.make([table.core for table in live], inputs)
    kind, at, bag, value, bound = batch.check()
    if kind:
        f = wanted[at]
        raise input_fault(kind, live[table_of[f]].name, names[f], bags[f], bag, value, bound)


@dataclasses.dataclass
class _Faults:
    """Finds words for what the device found bad in a batch."""

    live: list[LiveTable]
    table_of: list[int]
    names: list[str]
    bags: list[Bags]
    arrays: list[tuple[int, Array, Tensor]]

    def first(self, told: list[int]) -> HotbedError | None:
        if told[0]:
            return None
        for (f, kind, array), at in zip(self.arrays, told[1:], strict=True):
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


@dataclasses.dataclass(eq=False)
class _Source:
    """A batch of whole tables, as backward asks for it."""

    origin: Origin

    def index(self) -> None:
        """None: the transposed index is built on the device."""


@dataclasses.dataclass(eq=False)
class _Call:
    """One forward."""

    live: tuple[LiveTable, ...]
    lookup: Lookup
    features: list[FeatureSlots]
    source: _Source | TieredBatch
    bags: list[Bags]
    dtype: torch.dtype

    def pool(self) -> DeviceBatch:
        """Looks up; the outputs are shaped as the inputs were."""
        outputs: list[Any] = [None] * len(self.bags)
        columns: dict[int, list[int]] = {}  # features that share a buffer
        device = self.live[0].device_rows.device
        for f, (bag, feature) in enumerate(zip(self.bags, self.features, strict=True)):
            if bag.shape is None and not (bag.jagged and feature.combiner == "none"):
                columns.setdefault(bag.batch, []).append(f)
            else:
                dim = self.lookup.dims[feature.table]
                outputs[f] = torch.empty((feature.bags, dim), dtype=self.dtype, device=device)
        for rows, members in columns.items():
            dims = [self.lookup.dims[self.features[f].table] for f in members]
            buffer = torch.empty((rows, sum(dims)), dtype=self.dtype, device=device)
            with torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING):
                parts = torch.split(buffer, dims, 1) if len(dims) > 1 else (buffer,)
            for f, part in zip(members, parts, strict=True):
                outputs[f] = part
        batch = self.lookup.forward(self.features, self.dtype, outputs)
        shaped = [
            out if bag.shape is None else out.view(*bag.shape, out.shape[1])
            for bag, out in zip(self.bags, outputs, strict=True)
        ]
        return dataclasses.replace(batch, outputs=shaped)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """`tensors`: a handle a table (None: not wanted), then weights a feature, or None."""
        batch = call.pool()
        ctx.set_materialize_grads(False)
        anchor = torch.empty(0)  # so that a second backward raises as it does in torch
        ctx.call, ctx.inverses = call, batch.inverses
        ctx.generations = [table.generation for table in call.live]
        handles, weights = tensors[: len(call.live)], tensors[len(call.live) :]
        # Autograd numbers edges by the inputs that are tensors.
        ctx.edges = list(itertools.accumulate((h is not None for h in handles), initial=0))
        ctx.weighted = [f for f, w in enumerate(weights) if w is not None and w.requires_grad]
        # What backward reads again: autograd raises where it was changed in place by then.
        kept = [w for w in weights if w is not None]
        ctx.save_for_backward(*kept, *(batch.outputs[f] for f in ctx.weighted), anchor)
        return tuple(batch.outputs)

    @staticmethod
    @outside_graphs
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *saved, _ = ctx.saved_tensors  # raises where one was changed in place
        call: _Call = ctx.call
        for table, generation in zip(call.live, ctx.generations, strict=True):
            if table.generation != generation:
                raise TableError(
                    f"Table {table.name!r} was loaded or reset between this forward and its backward; "
                    "its gradient would reach other ids. Look the batch up again."
                )
        count = len(call.live)
        flat = _as_rows(call, grads)
        took_part = {f.table for f, g in zip(call.features, flat, strict=True) if g is not None}
        needed = ctx.needs_input_grad
        weight_grads: list[Tensor | None] = [None] * len(grads)
        pooled = dict(zip(ctx.weighted, saved[len(saved) - len(ctx.weighted) :], strict=True))
        wanted = [needed[1 + count + f] for f in range(len(grads))]
        fused = any(table.fused_update is not None for table in call.live)
        with alone(call.live) if fused else together(call.live):
            if any(wanted):  # before a step changes the rows
                outputs = [pooled.get(f) for f in range(len(grads))]
                weight_grads = _weight_gradients(call, ctx.inverses, flat, outputs, wanted)
            chosen = [t for t in range(count) if needed[1 + t] and t in took_part]
            handle_grads: list[Tensor | None] = [None] * count
            if chosen:
                batch = DeviceBatch(
                    features=tuple(call.features), outputs=[], inverses=ctx.inverses
                )
                terms = call.lookup.backward(batch, flat, call.source.index())
                origin = call.source.origin
                weights = tuple(
                    (f.table, f.weights)
                    for f, g in zip(call.features, flat, strict=True)
                    if g is not None and f.weights is not None
                )
                gradient = BatchGradient(call.live, terms, origin, weights)
                later = step_in_backward(gradient, chosen)
                for t in later:
                    handle = call.live[t].parameter
                    accumulate = ctx.next_functions[ctx.edges[t]][0]
                    handle_grads[t] = handle.waiting.take(handle, Share(gradient, t), accumulate)
        if not keeps_graph():
            ctx.call = None  # a loss that is kept would keep rows in their slots
        return None, *handle_grads, *weight_grads


def _as_rows(call: _Call, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """(bags, dim) of each gradient that there is, all of one dtype, columns side by side."""
    dtypes = {grad.dtype for grad in grads if grad is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        dtype = torch.float32
    flat: list[Tensor | None] = []
    for feature, grad in zip(call.features, grads, strict=True):
        if grad is not None:
            dim = call.lookup.dims[feature.table]
            grad = grad.reshape(-1, dim) if grad.dim() != 2 else grad
            grad = grad.to(dtype)
            if dim > 1 and grad.stride(1) != 1:
                grad = grad.contiguous()
        flat.append(grad)
    return flat


def _weight_gradients(
    call: _Call,
    inverses: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    features = tuple(call.features)
    found: list[Tensor | None] = [None] * len(features)
    chosen = [f for f, want in enumerate(wanted) if want]
    flat = [o.reshape(-1, o.shape[-1]) for f in chosen if (o := outputs[f]) is not None]
    batch = DeviceBatch(
        features=tuple(features[f] for f in chosen),
        outputs=flat,
        inverses=[inverses[f] for f in chosen],
    )
    results = call.lookup.weight_gradients(batch, [grads[f] for f in chosen])
    for f, result in zip(chosen, results, strict=True):
        weights = features[f].weights
        assert weights is not None
        found[f] = torch.zeros_like(weights) if result is None else result
    return found
