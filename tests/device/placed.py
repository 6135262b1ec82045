"""Models whose tables lie on the device under test, or on the host."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from devices import DEVICE
from torch import nn

from hotbed.handles import LiveTable, live_table
from hotbed.ops.gpu import variants

M = TypeVar("M", bound=nn.Module)


def tables_of(model: nn.Module) -> list[LiveTable]:
    """Every table once."""
    found = [live_table(p) for p in model.parameters()]
    return [table for table in found if table is not None]


def to_device(model: M) -> M:
    """As a user says it; where the CPU stands in for a device, that cannot be said."""
    if DEVICE.type == "cuda":
        return model.to(DEVICE)
    for table in tables_of(model):
        table.refuse_move(DEVICE)
        table.move_to(DEVICE)
    return model


def to_host(model: M) -> M:
    """The way back."""
    if DEVICE.type == "cuda":
        return model.cpu()
    before, variants.DEVICES = variants.DEVICES, ("cuda",)
    try:
        for table in tables_of(model):
            table.move_to(torch.device("cpu"))
    finally:
        variants.DEVICES = before
    return model


def moved(batch: Any) -> Any:
    """A batch on the device."""
    if isinstance(batch, dict):
        return {name: moved(part) for name, part in batch.items()}
    return batch.to(DEVICE)
