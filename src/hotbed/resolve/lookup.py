"""The one lookup path: check, resolve, pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import StorageError
from hotbed.handles import LiveTable
from hotbed.inputs import Bags, core_input, input_fault
from hotbed.jagged import Jagged
from hotbed.ops.pool import pool
from hotbed.resolve.tiers import over_budget
from hotbed.trace import span

__all__ = [
    "Prepared",
    "frozen_tables",
    "lookup",
    "make_batch",
    "signature_of",
]


class Prepared(NamedTuple):
    """A batch that was read and grouped before its forward."""

    signature: Any
    inputs: Any
    """Keeps the memory of the ids, which the core reads and the signature names."""
    bags: list[Bags]
    frozen: list[int]
    batch: Any
    """The core's."""


def signature_of(inputs: Any) -> Any:
    """What tells a batch from any other as long as its tensors are alive: where their elements lie,
    and how often they were changed. None where that cannot be told."""
    if isinstance(inputs, Tensor):
        if inputs.layout is not torch.strided or inputs.is_nested or inputs.is_inference():
            return None
        return inputs.data_ptr(), inputs._version, inputs.shape, inputs.stride(), inputs.dtype
    if isinstance(inputs, Jagged):
        parts: list[Any] = [inputs.values, inputs.offsets, inputs.weights]
    elif isinstance(inputs, Mapping):
        parts = list(inputs.values())
    elif isinstance(inputs, (list, tuple)):
        parts = list(inputs)
    elif inputs is None:
        return ()
    else:
        return None
    signatures = [signature_of(part) for part in parts]
    if any(signature is None for signature in signatures):
        return None
    names = tuple(inputs) if isinstance(inputs, Mapping) else ()
    return names, tuple(signatures)


def frozen_tables(live: Sequence[LiveTable]) -> list[int]:
    """Positions of tables whose parameter requires no gradient; they take no new rows."""
    return [t for t, table in enumerate(live) if not table.parameter.requires_grad]


def make_batch(live: Sequence[LiveTable], table_of: Sequence[int], bags: Sequence[Bags]) -> Any:
    """The core's batch over inputs that are read; of tiers on a device one that knows the way there."""
    if live[0].device_rows is not None:
        from hotbed.device.tiered import TieredBatch

        return TieredBatch(live, table_of, bags)
    inputs = [core_input(t, live[t].combiner, bag) for t, bag in zip(table_of, bags, strict=True)]
    return _core.Batch.make([table.core for table in live], inputs)


def lookup(
    live: Sequence[LiveTable],
    table_of: Sequence[int],
    names: Sequence[str],
    bags: Sequence[Bags],
    training: bool,
    batch: Any = None,
) -> list[Tensor]:
    """Resolves and pools one batch: the one path of every module.

    Args:
        live: the tables.
        table_of: for each feature, the position of its table in `live`.
        names: of the features, for errors.
        bags: the features' inputs.
        training: whether ids that a dynamic table has not met get rows; only where gradients are
            enabled, and not in a table whose parameter requires none.
        batch: the core's batch, where look-ahead has made and checked it.

    Raises:
        IdError, InputError, OutOfMemory, StorageError: before anything has changed.
        OptimizerError: a gradient of a table was left behind by an earlier step.
    """
    grad = torch.is_grad_enabled()
    for table in live:
        if table.parameter.data_ptr() != table.address:
            table.check_handle()
        if table.complaint is not None and training and grad:
            complaint, table.complaint = table.complaint, None
            raise complaint
    on_device = live[0].device_rows is not None
    if on_device:
        from hotbed.device.lookup import look_up, pool_resolved, raise_what_is_known

        raise_what_is_known(live)
        if live[0].tiers is None:
            return look_up(live, table_of, names, bags)
    if batch is None:
        batch = make_batch(live, table_of, bags)
        kind, feature, bag_at, value, bound = batch.check()
        if kind:
            name = live[table_of[feature]].name
            raise input_fault(kind, name, names[feature], bags[feature], bag_at, value, bound)
    frozen = frozen_tables(live)
    wanted = grad and len(frozen) < len(live)
    tiers = live[0].tiers
    with span("resolve"):
        try:
            batch.resolve(training and grad, wanted, frozen)
        except StorageError as error:
            # Look-ahead gives way to the batch that is there.
            if tiers is None or not error.needs or not tiers.close_window():
                raise error if tiers is None else over_budget(error, tiers) from None
            try:
                batch.resolve(training and grad, wanted, frozen)
            except StorageError as again:
                raise over_budget(again, tiers) from None
    if on_device:
        return pool_resolved(batch, live, bags)
    with span("pool"):
        return pool(batch, live, table_of, bags, wanted)
