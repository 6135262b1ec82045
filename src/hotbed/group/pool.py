"""Pool: rows → one vector a bag, with autograd: one function over a resolved batch.

One call serves all features of a collection. The forward writes every feature's vectors; features
with one vector a sample become columns of one (B, sum of dims) buffer. What a backward leaves goes to
the handles of the tables (`hotbed.table.gradients`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from hotbed.errors import TableError
from hotbed.ops.operation import Context
from hotbed.ops.outside_graphs import outside_graphs
from hotbed.table.backward import leave
from hotbed.table.locks import alone, together
from hotbed.table.resolved import Columns, PooledTable, Resolved

__all__ = ["pool"]

# Whether a backward that is under way was called with retain_graph=True.
_keeps_graph = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)  # not in torch 2.4

# Without it, the columns of a buffer are tensors of their own. Views of one another they are not:
# autograd would not let them be changed in place.
_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def pool(resolved: Resolved, handles: Sequence[Tensor]) -> list[Tensor]:
    """Looks a resolved batch up.

    Args:
        handles: of its tables.

    Returns:
        For each feature (bags, dim), bags of an unpooled feature being its ids; shaped (B, ..., dim)
        where the input had more than two dimensions.
    """
    if torch.is_grad_enabled():
        grad = resolved.wants_gradient
        wanted = [h if grad and h.requires_grad else None for h in handles]
        weights = [w for w in resolved.weights if w is not None]
        if any(h is not None for h in wanted) or any(w.requires_grad for w in weights):
            return list(_Pool.apply(resolved, *wanted, *weights))  # type: ignore[no-untyped-call]
    return _forward(resolved)


def _forward(resolved: Resolved) -> list[Tensor]:
    live, table_of = resolved.live, resolved.table_of
    outputs: dict[int, Tensor] = {}
    columns: list[Columns] = []
    shared: dict[tuple[int, torch.dtype], list[int]] = {}  # features of one buffer
    for f, (bag, t) in enumerate(zip(resolved.bags, table_of, strict=True)):
        table = live[t]
        unpooled, dtype = table.spec.combiner == "none", resolved.dtype_of(table)
        if bag.shape is None and not (bag.jagged and unpooled):
            shared.setdefault((bag.batch, dtype), []).append(f)
            continue
        vectors, dim = bag.ids.shape[0] if unpooled else bag.bags, table.spec.dim
        out = resolved.empty(vectors, dim, dtype)
        columns.append(Columns(out, (f,), (out,)))
        with torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING):
            outputs[f] = out if bag.shape is None else out.view(*bag.shape, dim)
    for (rows, dtype), members in shared.items():
        dims = [live[table_of[f]].spec.dim for f in members]
        buffer = resolved.empty(rows, sum(dims), dtype)
        with torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING):
            parts = buffer.split(dims, 1) if len(dims) > 1 else (buffer,)  # type: ignore[no-untyped-call]
        columns.append(Columns(buffer, members, parts))
        for f, part in zip(members, parts, strict=True):
            outputs[f] = part
    resolved.pool(columns)
    return [outputs[f] for f in range(len(table_of))]


class _Context(Context, Protocol):
    resolved: Resolved | None
    generations: list[int]
    writes: dict[int, int]
    edges: list[int]
    weighted: list[int]
    divided: list[int]

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]: ...


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, resolved: Resolved, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """`tensors`: a handle a table (None: not wanted), then the weights that there are."""
        outputs = tuple(_forward(resolved))
        ctx.set_materialize_grads(False)
        anchor = torch.empty(0)  # so that a second backward raises as it does in torch
        live, table_of = resolved.live, resolved.table_of
        ctx.resolved = resolved
        ctx.generations = [t.generation for t in live]
        handles, weights = tensors[: len(live)], tensors[len(live) :]
        # Autograd numbers edges by the inputs that are tensors.
        ctx.edges = list(itertools.accumulate((h is not None for h in handles), initial=0))
        ctx.weighted = [f for f, w in enumerate(resolved.weights) if w is not None]
        wanted = [f for f, w in zip(ctx.weighted, weights, strict=True) if w.requires_grad]  # type: ignore[union-attr]
        if wanted:
            resolved.keep_inputs()
        watched = {table_of[f] for f in wanted} if wanted and not resolved.has_own_rows else set()
        for t in watched:
            live[t].note_writes()  # of before, which these vectors are of
        ctx.writes = {t: live[t].place.writes for t in watched}
        # What backward reads again: autograd raises where it was changed in place by then.
        ctx.divided = [f for f in wanted if live[table_of[f]].spec.combiner != "sum"]
        ctx.save_for_backward(*weights, *(outputs[f] for f in ctx.divided), anchor)
        return outputs

    @staticmethod
    @outside_graphs
    @once_differentiable
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, _ = ctx.saved_tensors  # raises where one was changed in place
        resolved = ctx.resolved
        assert resolved is not None
        live = resolved.live
        needed = ctx.needs_input_grad[1 : 1 + len(live)]
        weights_needed = ctx.needs_input_grad[1 + len(live) :]
        took_part = {t for t, g in zip(resolved.table_of, grads, strict=True) if g is not None}
        chosen = [t for t, n in enumerate(needed) if n and t in took_part]
        outputs = dict(zip(ctx.divided, saved[len(ctx.weighted) :], strict=True))
        wanted = [f for f, n in zip(ctx.weighted, weights_needed, strict=True) if n]
        found: dict[int, Tensor] = {}
        fused = any(table.fused_update is not None for table in live)
        with alone(live) if fused else together(live):
            _check_generations(live, ctx.generations)
            left = resolved.backward(grads)
            if wanted:  # before a step changes the rows
                read = {resolved.table_of[f] for f in wanted if grads[f] is not None}
                _check_writes(live, ctx.writes, read)
                found = dict(
                    zip(wanted, resolved.weight_gradients(left, outputs, wanted), strict=True)
                )
            nodes = ctx.next_functions
            handle_grads = leave(left, live, {t: nodes[ctx.edges[t]][0] for t in chosen})
        if not _keeps_graph():
            ctx.resolved = None  # a loss that is kept would keep rows in their slots
        return None, *handle_grads, *(found.get(f) for f in ctx.weighted)


def _check_generations(live: Sequence[PooledTable], generations: Sequence[int]) -> None:
    """Raises TableError where slots of the forward mean nothing any more."""
    for table, generation in zip(live, generations, strict=True):
        if table.generation != generation:
            raise TableError(
                f"Table {table.name!r} was loaded, reset or erased from between this forward and its "
                "backward; its gradient would reach other ids. Look the batch up again."
            )


def _check_writes(live: Sequence[PooledTable], writes: Mapping[int, int], tables: Set[int]) -> None:
    """Raises TableError where rows have changed since the forward, of which gradients of weights are.

    Args:
        writes: how often rows of a table had changed by then, by its position.
        tables: positions of those whose rows the gradients are made of.
    """
    for t in sorted(tables & writes.keys()):
        table = live[t]
        if not table.note_writes() or table.place.writes != writes[t]:
            raise TableError(
                f"Table {table.name!r}: rows were changed between this forward and its backward, which is "
                "asked for gradients of weights. Call backward before the step, or look the batch up again."
            )
