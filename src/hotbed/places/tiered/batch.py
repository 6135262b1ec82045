"""Batches of tables in tiers find their rows: in slots, or brought up, or made ready by look-ahead."""

from __future__ import annotations

from typing import Any

import torch

from hotbed import trace
from hotbed.errors import StorageError
from hotbed.inputs.bags import Bags
from hotbed.places.host.batch import check
from hotbed.table.lookups import Call, Lookups

__all__ = ["resolve_in_tiers"]


def resolve_in_tiers(lookups: Lookups, call: Call) -> tuple[Any, bool, list[Bags] | None]:
    """The batch with its slots, whether a gradient will come, and what it reads in place of the inputs."""
    tiers = lookups.tiers
    batch = lookups.make_batch(call.live, call.table_of, call.bags)
    prepared = None
    if call.training and tiers.prepared:
        prepared = tiers.take_prepared(call.live, batch, call.frozen)
    if prepared is None:
        check(batch, call)
    else:
        prepared.batch.take_weights(batch)
        batch = prepared.batch
    wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
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
