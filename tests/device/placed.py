"""Models whose tables lie on the device under test, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from devices import DEVICE
from torch import Tensor, nn

from hotbed import devices
from hotbed.places import moves
from hotbed.table.live import LiveTable, live_table

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
        moves.refuse_move(table, DEVICE)
        moves.move(table, DEVICE)
    return model


def to_host(model: M) -> M:
    """The way back."""
    if DEVICE.type == "cuda":
        return model.cpu()
    before, devices.KINDS = devices.KINDS, ("cuda",)
    try:
        for table in tables_of(model):
            moves.move(table, torch.device("cpu"))
    finally:
        devices.KINDS = before
    return model


def drawn(seed: int, size: int, rows: int) -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """A function of a shape that draws ids, low ones more often; and lengths and weights of bags."""
    g = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return (rows * torch.rand(*shape, generator=g) ** 2).long()

    lengths = torch.randint(0, 4, (size,), generator=g)
    return ids, lengths, torch.rand(int(lengths.sum()), generator=g) + 0.1


def moved(batch: Any) -> Any:
    """A batch on the device."""
    if isinstance(batch, dict):
        return {name: moved(part) for name, part in batch.items()}
    return batch.to(DEVICE)
