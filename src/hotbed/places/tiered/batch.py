"""Batches of tables in tiers find their rows: in slots, or brought up, or made ready by look-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hotbed import trace
from hotbed.errors import StorageError
from hotbed.inputs.bags import Bags
from hotbed.places.host.batch import check
from hotbed.places.tiered.prepared import Offered, Offers
from hotbed.table.lookups import Call, InputBatch, StoredTable

__all__ = ["resolve_in_tiers"]


class PreparedBatch(Offered, Protocol):
    """A batch that look-ahead has ready: `hotbed.places.tiered.prepared.Prepared`."""

    waited_for: bool

    @property
    def batch(self) -> InputBatch: ...
    @property
    def bags(self) -> Sequence[Bags]: ...


class PreparingTiers(Protocol):
    """Tiers with the batches that look-ahead has ready: `hotbed.places.tiered.tiers.Tiers`."""

    waited_for: int
    prepared: Offers[PreparedBatch]

    def close_window(self) -> bool: ...
    def over_budget(self, error: StorageError) -> StorageError: ...


def resolve_in_tiers(
    tiers: PreparingTiers, batch: InputBatch, call: Call
) -> tuple[InputBatch, bool, Sequence[Bags] | None]:
    """The batch with its slots, whether a gradient will come, and what it reads in place of the inputs."""
    prepared = None
    if call.training and tiers.prepared.batches:
        prepared = tiers.prepared.pop(call.live, batch, call.frozen)
    if prepared is None:
        check(batch, call)
    else:
        prepared.batch.use_weights_of(batch)
        batch = prepared.batch
    wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
    if call.training:
        _wait_for_room(call.live)
    with trace.span("resolve"):
        try:
            batch.resolve(call.training, wanted, call.frozen)
        except StorageError as error:
            # Look-ahead gives way to the batch that is there.
            if not error.needs or not tiers.close_window():
                raise tiers.over_budget(error) from None
            try:
                batch.resolve(call.training, wanted, call.frozen)
            except StorageError as again:
                raise tiers.over_budget(again) from None
    if prepared is not None:
        tiers.waited_for += prepared.waited_for
    return batch, wanted, None if prepared is None else prepared.bags


def _wait_for_room(live: Sequence[StoredTable]) -> None:
    """Wait until a save in the background has room for rows that the batch may evict."""
    for table in live:
        if table.core.in_snapshot:
            table.core.wait_for_snapshot(False)
            return
