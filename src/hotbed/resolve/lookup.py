"""The one lookup path: check, resolve, pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import HotbedError, IdError, InputError
from hotbed.handles import LiveTable
from hotbed.inputs import Bags
from hotbed.ops.pool import pool

__all__ = ["lookup"]


def lookup(
    live: Sequence[LiveTable],
    table_of: Sequence[int],
    names: Sequence[str],
    bags: Sequence[Bags],
    training: bool,
) -> list[Tensor]:
    """Resolves and pools one batch: the one path of every module.

    Args:
        live: the tables.
        table_of: for each feature, the position of its table in `live`.
        names: of the features, for errors.
        bags: the features' inputs.
        training: whether ids that a dynamic table has not met get rows; only where gradients are
            enabled, and not in a table whose parameter requires none.

    Raises:
        IdError, InputError, OutOfMemory: before anything has changed.
        OptimizerError: a gradient of a table was left behind by an earlier step.
    """
    grad = torch.is_grad_enabled()
    frozen = []
    for t, table in enumerate(live):
        parameter = table.parameter
        if parameter.data_ptr() != table.address:
            table.check_handle()
        if not parameter.requires_grad:
            frozen.append(t)
        if table.complaint is not None and training and grad:
            complaint, table.complaint = table.complaint, None
            raise complaint
    inputs = []
    for t, bag in zip(table_of, bags, strict=True):
        ids, offsets, fixed, count, weights, _, _, _ = bag
        inputs.append(
            (
                t,
                live[t].combiner,
                ids.data_ptr(),
                4 if ids.dtype is torch.int32 else 8,
                ids.shape[0],
                0 if offsets is None else offsets.data_ptr(),
                fixed,
                count,
                0 if weights is None else weights.data_ptr(),
            )
        )
    batch = _core.Batch.make([table.core for table in live], inputs)
    kind, feature, bag_at, value, bound = batch.check()
    if kind:
        bag = bags[feature]
        sample = bag_at if bag.bags == bag.batch else bag_at * bag.batch // bag.bags
        raise _fault(kind, live[table_of[feature]], names[feature], sample, value, bound)
    wanted = grad and len(frozen) < len(live)
    batch.resolve(training and grad, wanted, frozen)
    return pool(batch, live, table_of, bags, wanted)


def _fault(
    kind: int, table: LiveTable, feature: str, sample: int, value: int, bound: int
) -> HotbedError:
    where = f"Table {table.name!r}, feature {feature!r}"
    if kind == 1:
        return IdError(
            f"{where}, sample {sample}: id {value} is outside [0, {bound}). "
            "Pass rows=None for open-ended ids."
        )
    if kind == 2:
        return InputError(f"{where}: offsets must start at 0, they start at {value}.")
    if kind == 3:
        return InputError(
            f"{where}, sample {sample}: offsets must rise, but {value} follows {bound} "
            f"(a length of {value - bound})."
        )
    return InputError(
        f"{where}: offsets end at {value} (the sum of the lengths), but there are {bound} values."
    )
