"""Pool: rows → one vector a bag, with autograd.

One call serves all features of a collection. The forward writes every feature's vectors; features
with one vector a sample become columns of one (B, sum of dims) buffer. The backward returns, for
each table's handle, a sparse COO gradient over unique slots in order of first appearance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotbed import _core
from hotbed.handles import CORE_DTYPES, LiveTable
from hotbed.inputs import Bags

__all__ = ["pool"]


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
    handles = [t.parameter if grad and t.parameter.requires_grad else None for t in tables]
    weights = [b.weights for b in bags]
    if torch.is_grad_enabled() and (
        any(h is not None for h in handles)
        or any(w is not None and w.requires_grad for w in weights)
    ):
        return list(_Pool.apply(batch, tables, table_of, bags, *handles, *weights))
    return _forward(batch, tables, table_of, bags)


def _forward(
    batch: Any, tables: Sequence[LiveTable], table_of: Sequence[int], bags: Sequence[Bags]
) -> list[Tensor]:
    outputs: list[Tensor] = []
    places: list[tuple[int, int]] = []
    columns: dict[tuple[int, torch.dtype], list[int]] = {}  # features that share a buffer
    count = len(bags)
    shared: list[Tensor | None] = [None] * count
    if count > 1:
        for f in range(count):
            bag = bags[f]
            if (
                bag.shape is None
                and bag.bags == bag.batch
                and not (bag.jagged and tables[table_of[f]].spec.combiner == "none")
            ):
                key = (bag.batch, tables[table_of[f]].spec.compute_dtype)
                columns.setdefault(key, []).append(f)
        for (rows, dtype), members in columns.items():
            dims = [tables[table_of[f]].spec.dim for f in members]
            buffer = _core.empty([rows, sum(dims)], CORE_DTYPES[dtype])
            storage, stride, offset = buffer.untyped_storage(), sum(dims), 0
            for f, dim in zip(members, dims, strict=True):
                # Not a view to autograd, which would forbid in-place operations on it.
                shared[f] = torch.empty(0, dtype=dtype).set_(
                    storage, offset, (rows, dim), (stride, 1)
                )
                offset += dim
    for f in range(count):
        out = shared[f]
        bag = bags[f]
        if out is None:
            spec = tables[table_of[f]].spec
            vectors = len(bag.ids) if spec.combiner == "none" else bag.bags
            out = _core.empty([vectors, spec.dim], CORE_DTYPES[spec.compute_dtype])
            places.append((out.data_ptr(), spec.dim))
            if bag.shape is not None:
                out = out.view(*bag.shape, spec.dim)
        else:
            places.append((out.data_ptr(), out.stride(0)))
        outputs.append(out)
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
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        outputs = tuple(_forward(batch, tables, table_of, bags))
        ctx.set_materialize_grads(False)
        ctx.call = (batch, tables, table_of, bags)
        weights = tensors[len(tables) :]
        weighted = any(w is not None for w in weights)
        ctx.weight_gradients = any(w is not None and w.requires_grad for w in weights)
        if ctx.weight_gradients:
            # Backward reads the ids, offsets and outputs again: autograd watches them for changes.
            watched = [t for b in bags for t in (b.ids, b.offsets, b.weights) if t is not None]
            ctx.save_for_backward(*watched, *outputs)
        elif weighted:
            ctx.save_for_backward(*(w for w in weights if w is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        batch, tables, table_of, bags = ctx.call
        saved = ctx.saved_tensors  # raises where one was changed in place
        count = len(tables)
        taking_part = [False] * count
        held: list[Tensor] = []  # alive until the core has read them
        places: list[tuple[int, int]] = []
        for f, grad in enumerate(grads):
            spec = tables[table_of[f]].spec
            if grad is None or grad.numel() == 0:
                places.append((0, 0))
                continue
            taking_part[table_of[f]] = True
            if grad.dim() != 2:
                grad = grad.reshape(-1, spec.dim)
            if grad.dtype != spec.compute_dtype:
                grad = grad.to(spec.compute_dtype)
            if grad.stride(1) != 1 and spec.dim > 1:
                grad = grad.contiguous()
            held.append(grad)
            places.append((grad.data_ptr(), grad.stride(0)))
        needed = ctx.needs_input_grad[4 : 4 + count]
        handle_grads = _reduce(
            batch, tables, [n and p for n, p in zip(needed, taking_part, strict=True)], places
        )
        weight_grads: list[Tensor | None] = [None] * len(bags)
        if ctx.weight_gradients:
            outputs = saved[len(saved) - len(bags) :]
            weight_grads = _weight_gradients(
                batch, bags, places, outputs, ctx.needs_input_grad[4 + count :]
            )
        return (None, None, None, None, *handle_grads, *weight_grads)


def _reduce(
    batch: Any, tables: Sequence[LiveTable], needed: Sequence[bool], places: list[tuple[int, int]]
) -> list[Tensor | None]:
    unique = batch.unique_counts()
    totals = {torch.float32: 0, torch.float64: 0}
    rows = 0
    for t, table in enumerate(tables):
        if needed[t]:
            totals[table.spec.compute_dtype] += unique[t] * table.spec.dim
            rows += unique[t]
    blocks = {d: _core.empty([n], CORE_DTYPES[d]) for d, n in totals.items() if n}
    indices = torch.empty((1, rows), dtype=torch.int64)
    values_at, indices_at = [0] * len(tables), [0] * len(tables)
    pieces: list[tuple[Tensor, Tensor] | None] = [None] * len(tables)
    used = {torch.float32: 0, torch.float64: 0}
    row = 0
    for t, table in enumerate(tables):
        if not needed[t]:
            continue
        n, dim, dtype = unique[t], table.spec.dim, table.spec.compute_dtype
        if n == 0:
            pieces[t] = indices[:, :0], torch.empty((0, dim), dtype=dtype)
            continue
        values = blocks[dtype].narrow(0, used[dtype], n * dim).view(n, dim)
        own = indices.narrow(1, row, n)
        used[dtype] += n * dim
        row += n
        values_at[t], indices_at[t] = values.data_ptr(), own.data_ptr()
        pieces[t] = own, values
    batch.reduce(places, values_at, indices_at)
    grads: list[Tensor | None] = [None] * len(tables)
    for t, piece in enumerate(pieces):
        if piece is None:
            continue
        table = tables[t]
        if table.fused_update is not None:
            table.fused_update(piece[0][0], piece[1])
            continue
        grads[t] = torch.sparse_coo_tensor(
            piece[0], piece[1], table.parameter.shape, check_invariants=False
        )
    return grads


def _weight_gradients(
    batch: Any,
    bags: Sequence[Bags],
    places: list[tuple[int, int]],
    outputs: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    results: list[Tensor | None] = [None] * len(bags)
    addresses = [0] * len(bags)
    for f, bag in enumerate(bags):
        if bag.weights is not None and needed[f]:
            result = torch.zeros_like(bag.weights)
            results[f] = result
            if places[f][0]:
                addresses[f] = result.data_ptr()
    batch.weight_gradients(places, [(o.data_ptr(), o.stride(0)) for o in outputs], addresses)
    return results
