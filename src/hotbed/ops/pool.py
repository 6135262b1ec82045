"""Pool: rows → one vector a bag, with autograd.

One call serves all features of a collection. The forward writes every feature's vectors; features
with one vector a sample become columns of one (B, sum of dims) buffer. The backward returns, for
each table's handle, a gradient over unique slots in order of first appearance, which the handle keeps
(`hotbed.gradients`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotbed import _core
from hotbed.errors import StorageError, TableError
from hotbed.gradients import LeftRows, plain_access
from hotbed.handles import CORE_DTYPES, LiveTable
from hotbed.holds import alone, together
from hotbed.inputs import Bags
from hotbed.resolve.outside_graphs import outside_graphs
from hotbed.resolve.tiers import over_budget

__all__ = ["keeps_graph", "pool"]

# Whether a backward that is under way was called with retain_graph=True.
keeps_graph = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)  # not in torch 2.4

# Without it, the columns of a buffer are tensors of their own. Views of one another they are not:
# autograd would not let them be changed in place.
_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def pool(
    batch: Any,
    tables: Sequence[LiveTable],
    table_of: Sequence[int],
    bags: Sequence[Bags],
    grad: bool,
) -> list[Tensor]:
    """Looks a resolved batch up.

    Args:
        batch: the core's batch, resolved (and transposed where `grad`).
        tables: the live tables of the batch.
        table_of: for each feature, the position of its table in `tables`.
        bags: for each feature, its input.
        grad: whether the handles take part in autograd.

    Returns:
        For each feature (bags, dim) of the table's compute dtype, bags of an unpooled feature being
        its ids; shaped (B, ..., dim) where the input had more than two dimensions.
    """
    if torch.is_grad_enabled():
        handles = [p if grad and (p := t.parameter).requires_grad else None for t in tables]
        weighted = [f for f, bag in enumerate(bags) if bag.weights is not None]
        weights = [bags[f].weights for f in weighted]
        if any(h is not None for h in handles) or any(w.requires_grad for w in weights):  # type: ignore[union-attr]
            return list(
                _Pool.apply(batch, tables, table_of, bags, weighted, *handles, *weights)  # type: ignore[no-untyped-call]
            )
    return _forward(batch, tables, table_of, bags)


def _forward(
    batch: Any, tables: Sequence[LiveTable], table_of: Sequence[int], bags: Sequence[Bags]
) -> list[Tensor]:
    outputs: list[Any] = [None] * len(bags)
    places = [(0, 0)] * len(bags)
    columns: dict[tuple[int, torch.dtype], list[int]] = {}  # features that share a buffer
    for f, (bag, t) in enumerate(zip(bags, table_of, strict=True)):
        spec = tables[t].spec
        if bag.shape is None and not (bag.jagged and spec.combiner == "none"):
            columns.setdefault((bag.batch, tables[t].compute_dtype), []).append(f)
            continue
        vectors = bag.ids.shape[0] if spec.combiner == "none" else bag.bags
        out = _core.empty([vectors, spec.dim], CORE_DTYPES[tables[t].compute_dtype])
        places[f] = out.data_ptr(), spec.dim
        outputs[f] = out if bag.shape is None else out.view(*bag.shape, spec.dim)
    for (rows, dtype), members in columns.items():
        dims = [tables[table_of[f]].spec.dim for f in members]
        width = sum(dims)
        buffer = _core.empty([rows, width], CORE_DTYPES[dtype])
        at = buffer.data_ptr()
        with torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING):
            parts = buffer.split(dims, 1) if len(dims) > 1 else (buffer,)
        for f, part, dim in zip(members, parts, dims, strict=True):
            outputs[f], places[f] = part, (at, width)
            at += dim * dtype.itemsize
    batch.pool(places)
    return outputs


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        batch: Any,
        tables: Sequence[LiveTable],
        table_of: Sequence[int],
        bags: Sequence[Bags],
        weighted: Sequence[int],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """`tensors`: a handle a table (None: not wanted), then the weights of features `weighted`."""
        outputs = tuple(_forward(batch, tables, table_of, bags))
        ctx.set_materialize_grads(False)
        # So that a second backward raises as it does in torch.
        anchor = torch.empty(0)
        ctx.batch = batch
        ctx.call = (tables, table_of, bags, weighted)
        ctx.generations = [t.generation for t in tables]
        # Autograd numbers edges by the inputs that are tensors.
        handles = tensors[: len(tables)]
        ctx.edges = list(itertools.accumulate((h is not None for h in handles), initial=0))
        weights = tensors[len(tables) :]
        wanted = [f for f, w in zip(weighted, weights, strict=True) if w.requires_grad]  # type: ignore[union-attr]
        if wanted:
            batch.keep_inputs()
        # What backward reads again: autograd raises where it was changed in place by then.
        divided = [f for f in wanted if tables[table_of[f]].spec.combiner != "sum"]
        ctx.divided = divided
        ctx.save_for_backward(*weights, *(outputs[f] for f in divided), anchor)
        return outputs

    @staticmethod
    @outside_graphs
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tables, table_of, bags, weighted = ctx.call
        *saved, _ = ctx.saved_tensors  # raises where one was changed in place
        batch = ctx.batch
        for table, generation in zip(tables, ctx.generations, strict=True):
            if table.generation != generation:
                raise TableError(
                    f"Table {table.name!r} was loaded or reset between this forward and its backward; "
                    "its gradient would reach other ids. Look the batch up again."
                )
        count = len(tables)
        taking_part = [False] * count
        held: list[Tensor] = []  # alive until the core has read them
        places = [(0, 0)] * len(grads)
        for f, grad in enumerate(grads):
            if grad is None:
                continue
            table = tables[table_of[f]]
            taking_part[table_of[f]] = True
            if grad.numel() == 0:
                continue
            dim = table.spec.dim
            if grad.dim() != 2:
                grad = grad.reshape(-1, dim)
            if grad.dtype != table.compute_dtype:
                grad = grad.to(table.compute_dtype)
            if grad.is_neg():  # kept as the opposite, with a mark that addresses lack
                grad = grad.resolve_neg()
            stride, step = grad.stride()
            if step != 1 and dim > 1:
                grad = grad.contiguous()
                stride = dim
            held.append(grad)
            places[f] = grad.data_ptr(), stride
        needed = ctx.needs_input_grad
        weight_grads: list[Tensor | None] = [None] * len(weighted)
        fused = any(table.fused_update is not None for table in tables)
        with alone(tables) if fused else together(tables):
            handle_grads = _reduce(
                batch,
                tables,
                [n and p for n, p in zip(needed[5 : 5 + count], taking_part, strict=True)],
                places,
                lambda t: ctx.next_functions[ctx.edges[t]][0],
            )
            if any(needed[5 + count :]):
                outputs = dict(zip(ctx.divided, saved[len(weighted) :], strict=True))
                wanted = [f for f, n in zip(weighted, needed[5 + count :], strict=True) if n]
                found = _weight_gradients(batch, bags, places, outputs, wanted)
                weight_grads = [found.get(f) for f in weighted]
        if not keeps_graph():
            ctx.batch = None  # a loss that is kept would keep rows in their slots
        return (None, None, None, None, None, *handle_grads, *weight_grads)


def _reduce(
    batch: Any,
    tables: Sequence[LiveTable],
    needed: Sequence[bool],
    places: list[tuple[int, int]],
    accumulate: Callable[[int], Any],
) -> list[Tensor | None]:
    """What backward returns for each table's handle: None where the gradient is not needed, was taken
    by the handle itself, or was applied at once (fused).

    `accumulate`: of a table, the node by which torch would add it to the handle's ``grad``.
    """
    unique = batch.unique_counts()
    tiers = tables[0].tiers
    try:
        all_seated = batch.seat()
    except StorageError as error:
        raise error if tiers is None else over_budget(error, tiers) from None
    # What an optimizer updates at once, and what it wants to have.
    starts = {
        t: table.fused_update.start()
        for t, (table, n) in enumerate(zip(tables, needed, strict=True))
        if n and table.fused_update is not None
    }
    steps = [(t, *start) for t, start in starts.items() if start is not None]
    if steps:
        _step_fused(batch, tables, steps, places)
    fused = {t for t, _, _ in steps}
    chosen = [t for t, n in enumerate(needed) if n and t not in fused]
    counts = [unique[t] for t in chosen]
    indices = torch.empty((1, sum(counts)), dtype=torch.int64, device="cpu")
    index_parts = indices.split(counts, 1)  # type: ignore[no-untyped-call]
    # One block of values for all tables of a dtype: memory is taken, and given back, once.
    values: dict[int, Tensor] = {}
    for dtype in {tables[t].compute_dtype for t in chosen}:
        same = [t for t in chosen if tables[t].compute_dtype is dtype]
        sizes = [unique[t] * tables[t].spec.dim for t in same]
        block = _core.empty([sum(sizes)], CORE_DTYPES[dtype])
        for t, part in zip(same, block.split(sizes), strict=True):
            values[t] = part.view(unique[t], tables[t].spec.dim)
    values_at, indices_at = [0] * len(tables), [0] * len(tables)
    at = indices.data_ptr()
    for t in chosen:
        values_at[t], indices_at[t] = values[t].data_ptr(), at
        at += 8 * unique[t]
    all_finite = batch.reduce(places, values_at, indices_at) if chosen else []
    grads: list[Tensor | None] = [None] * len(tables)
    for t, index in zip(chosen, index_parts, strict=True):
        slots, rows, finite = index[0], values[t], all_finite[t]
        if not all_seated:  # ids that have no row: evaluation stores none
            kept = slots >= 0
            slots, rows = slots[kept], rows[kept]
        if not len(rows):  # torch adds to it in place, which memory of the core would not allow
            slots, rows = slots.clone(), torch.empty_like(rows)
        left = LeftRows(slots, rows, True, finite, batch.claim)
        if t in starts:
            tables[t].fused_update.keep(left)
        else:
            handle = tables[t].parameter
            with plain_access():
                grads[t] = handle.waiting.take(handle, left, accumulate(t))
    return grads


def _step_fused(
    batch: Any,
    tables: Sequence[LiveTable],
    steps: list[tuple[int, Any, Any]],
    places: list[tuple[int, int]],
) -> None:
    """Steps tables at once, (position, rule, numbers) each, without a gradient of their own."""
    at, element, slot = _core.step_fused(batch, places, steps)
    if at >= 0:
        raise tables[at].fused_update.refuse(slot, element)
    for t, _, _ in steps:
        tables[t].fused_update.done()


def _weight_gradients(
    batch: Any,
    bags: Sequence[Bags],
    places: list[tuple[int, int]],
    outputs: dict[int, Tensor],
    wanted: Sequence[int],
) -> dict[int, Tensor]:
    """The gradient of the weights of each wanted feature; `outputs` of those that are divided."""
    results: dict[int, Tensor] = {}
    for f in wanted:
        weights = bags[f].weights
        assert weights is not None
        results[f] = torch.zeros_like(weights)
    pooled, addresses = [(0, 0)] * len(bags), [0] * len(bags)
    for f, result in results.items():
        if places[f][0]:
            addresses[f] = result.data_ptr()
    for f, out in outputs.items():
        pooled[f] = out.data_ptr(), out.stride(0)
    batch.weight_gradients(places, pooled, addresses)
    return results
