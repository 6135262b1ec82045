"""The one lookup path: check, resolve, pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import _core
from hotbed.errors import HotbedError, IdError, InputError, OptimizerError
from hotbed.handles import LiveTable
from hotbed.inputs import Bags
from hotbed.ops.pool import pool
from hotbed.tables import COMBINERS

__all__ = ["lookup"]


def lookup(
    live: Sequence[LiveTable],
    cores: Sequence[Any],
    table_of: Sequence[int],
    names: Sequence[str],
    bags: Sequence[Bags],
    module: nn.Module,
) -> list[Tensor]:
    """Resolves and pools one batch: the one path of every module.

    Raises:
        IdError, InputError: before anything has changed.
        OptimizerError: a gradient of a table was left behind by an earlier step.
    """
    training = module.training and torch.is_grad_enabled()
    for table in live:
        if table.complaint is not None and training:
            complaint, table.complaint = table.complaint, None
            raise complaint
        table.check_handle()
    if torch.distributed.is_available() and _inside_ddp():
        raise OptimizerError(
            f"Table {live[0].name!r} is inside DistributedDataParallel, which would copy whole tables "
            "to every rank and average their gradients; use hotbed.distribute(model) instead."
        )
    batch = _core.Batch.make(
        cores,
        [
            (
                t,
                COMBINERS.index(live[t].spec.combiner or "none"),
                bag.ids.data_ptr(),
                bag.ids.itemsize,
                bag.ids.shape[0],
                0 if bag.offsets is None else bag.offsets.data_ptr(),
                bag.fixed,
                bag.bags,
                0 if bag.weights is None else bag.weights.data_ptr(),
            )
            for t, bag in zip(table_of, bags, strict=True)
        ],
    )
    kind, feature, sample, value, bound = batch.check()
    if kind:
        raise _fault(kind, live[table_of[feature]], names[feature], sample, value, bound)
    grad = torch.is_grad_enabled() and any(table.parameter.requires_grad for table in live)
    batch.resolve(training, grad)
    return pool(batch, live, table_of, bags, grad)


def _inside_ddp() -> bool:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._active_ddp_module is not None


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
