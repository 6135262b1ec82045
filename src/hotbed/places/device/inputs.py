"""Inputs that lie on the host, on their way to the device: through memory that nobody else writes to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bring", "bring_weights"]


def bring(
    arrays: Sequence[tuple[Tensor, Tensor | None]], device: torch.device
) -> list[tuple[Tensor, Tensor | None]]:
    """Ids and offsets on the device; those of the host travel together, behind nobody's back."""
    flat = [part for pair in arrays for part in pair]
    wanted = [p for p in flat if p is not None and p.device != device]
    if not wanted:
        return list(arrays)
    total = sum(part.shape[0] for part in wanted)
    pinned = device.type == "cuda"
    packed = torch.empty(total, dtype=torch.int64, device="cpu", pin_memory=pinned)
    torch.cat([part.long() for part in wanted], out=packed)
    sizes = [part.shape[0] for part in wanted]
    there = iter(torch.split(packed.to(device, non_blocking=True), sizes))

    def moved(part: Tensor) -> Tensor:
        return part if part.device == device else next(there)

    return [(moved(ids), None if offsets is None else moved(offsets)) for ids, offsets in arrays]


def bring_weights(weights: Tensor | None, device: torch.device) -> Tensor | None:
    """Weights on the device, as autograd knows them; but for that, behind nobody's back either."""
    if weights is None or weights.device == device:
        return weights
    if weights.requires_grad or device.type != "cuda":
        return weights.to(device)
    host = torch.empty(weights.shape, dtype=weights.dtype, device="cpu", pin_memory=True)
    return host.copy_(weights).to(device, non_blocking=True)
