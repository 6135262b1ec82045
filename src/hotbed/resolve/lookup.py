"""The one lookup path: check, resolve, pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import InputError, StorageError
from hotbed.handles import LiveTable
from hotbed.inputs import Bags, core_input, input_fault
from hotbed.ops.pool import Resolved, pool
from hotbed.placement import refuse_mixed_places
from hotbed.resolve.on_host import HostBatch
from hotbed.resolve.tiers import over_budget
from hotbed.trace import span

__all__ = [
    "Prepared",
    "frozen_tables",
    "lookup",
    "make_batch",
]


@dataclasses.dataclass(slots=True, eq=False)
class Prepared:
    """A batch that was read and grouped before its forward.

    A forward knows it by its ids: the core compares what it gets with what was grouped, so it does
    not matter what they lie in.
    """

    inputs: Any
    live: Sequence[LiveTable]
    table_of: Sequence[int]
    names: Sequence[str]
    read: Callable[[Any], list[Bags]]
    """Makes bags of inputs, once now and again to see whether the loader has changed them."""
    frozen: list[int] = dataclasses.field(init=False)
    bags: list[Bags] = dataclasses.field(init=False)
    """What the core reads after it has grouped: copies, which nobody else changes."""
    batch: Any = dataclasses.field(init=False)
    """The core's."""

    def __post_init__(self) -> None:
        self.frozen = frozen_tables(self.live)
        self.bags = [
            _copied(bag, t in self.frozen)
            for t, bag in zip(self.table_of, self.read(self.inputs), strict=True)
        ]
        self.batch = make_batch(self.live, self.table_of, self.bags)

    def serves(self, live: Sequence[LiveTable], batch: Any, frozen: list[int]) -> bool:
        """Whether it is what a forward asks for by `batch`, which need not have been checked."""
        same = self.live is live and self.frozen == frozen
        return same and bool(self.batch.first_difference(batch) < 0)

    def change(self, inputs: Any) -> str | None:
        """What to say where the inputs of the same batch are not any more what was read."""
        try:
            bags = self.read(inputs)
            at = self.batch.first_difference(make_batch(self.live, self.table_of, bags))
            if at < 0:
                return None
            what = f"feature {self.names[at]!r}"
        except InputError as error:
            what = str(error).rstrip(".")
        return (
            f"A batch was changed after look-ahead had read it ({what}). A loader that fills the same "
            "tensors or containers again would train other batches than it gives: let it make new ones "
            "for each batch, or use lookahead(..., depth=0)."
        )


def _copied(bag: Bags, ids_too: bool) -> Bags:
    """With offsets of its own where they lie on the host, and ids if wanted."""
    if bag.offsets is not None and bag.offsets.device.type == "cpu":
        bag = bag._replace(offsets=bag.offsets.clone())
    return bag._replace(ids=bag.ids.clone()) if ids_too else bag


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
        IdError, InputError, OutOfMemory, StorageError: before anything has changed.
        OptimizerError: a gradient of a table was left behind by an earlier step.
    """
    grad = torch.is_grad_enabled()
    training = training and grad
    first = live[0]
    for table in live:
        if table.parameter.data_ptr() != table.address:
            table.check_handle()
        if table.complaint is not None and training:
            complaint, table.complaint = table.complaint, None
            raise complaint
        if table.place is not first.place and table.place != first.place:
            refuse_mixed_places({t.name: t for t in live})
    tiers = first.tiers
    while True:
        if tiers is not None:
            tiers.settle()
        with _core.Hold.of_forward([table.core for table in live], training) as hold:
            if tiers is not None and any(table.core.homeless for table in live):
                continue  # an optimizer was made just now
            if first.device_rows is None:
                batch, wanted, _ahead = _resolve(live, table_of, names, bags, training)
                resolved: Resolved = HostBatch(batch, live, table_of, bags, wanted)
            else:
                from hotbed.device.lookup import arrived, raise_what_is_known, resolve_whole

                raise_what_is_known(live, training=training)
                if tiers is None:
                    resolved = resolve_whole(live, table_of, names, bags)
                else:
                    batch, _, _ahead = _resolve(live, table_of, names, bags, training)
                    resolved = arrived(batch, live, table_of, bags)
            hold.share()
            with span("pool"):
                return pool(resolved)


def _resolve(
    live: Sequence[LiveTable],
    table_of: Sequence[int],
    names: Sequence[str],
    bags: Sequence[Bags],
    training: bool,
) -> tuple[Any, bool, Prepared | None]:
    """The batch with its slots, whether a gradient will come, and what must live until it is pooled."""
    batch = make_batch(live, table_of, bags)
    frozen = frozen_tables(live)
    tiers = live[0].tiers
    prepared = None
    if training and tiers is not None and tiers.prepared:
        prepared = tiers.take_prepared(live, batch, frozen)
    if prepared is None:
        kind, feature, bag_at, value, bound = batch.check()
        if kind:
            name = live[table_of[feature]].name
            raise input_fault(kind, name, names[feature], bags[feature], bag_at, value, bound)
    else:
        prepared.batch.take_weights(batch)
        batch = prepared.batch
    wanted = torch.is_grad_enabled() and len(frozen) < len(live)
    with span("resolve"):
        try:
            batch.resolve(training, wanted, frozen)
        except StorageError as error:
            # Look-ahead gives way to the batch that is there.
            if tiers is None or not error.needs or not tiers.close_window():
                raise error if tiers is None else over_budget(error, tiers) from None
            try:
                batch.resolve(training, wanted, frozen)
            except StorageError as again:
                raise over_budget(again, tiers) from None
    return batch, wanted, prepared
