"""GradScaler on ranks: all of them skip a step, or none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from hotbed.dist.clipping import look_for_infinities
from hotbed.dist.ranks import Ranks
from hotbed.dist.shards import TableOnRanks
from hotbed.optim.base import TableOptimizer

__all__ = ["watch_scalers"]

_CPU = torch.device("cpu")
_Unscale = Callable[..., dict[torch.device, Tensor]]
_watching = False


def watch_scalers() -> None:
    """From now on, a GradScaler that unscales the gradients of tables on ranks asks all ranks for infinities.

    It has no hook for that; what it keeps of infinities is what its ``_unscale_grads_`` returns. What others
    have put in its place before or after is called, too.
    """
    global _watching
    if not _watching:
        _watching = True
        GradScaler._unscale_grads_ = _watched(GradScaler._unscale_grads_)  # type: ignore[method-assign]


def _watched(unscale: _Unscale) -> _Unscale:
    @functools.wraps(unscale)
    def watched(
        self: GradScaler,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        *args: object,
        **options: object,
    ) -> dict[torch.device, Tensor]:
        found = unscale(self, optimizer, inv_scale, found_inf, *args, **options)
        tables = optimizer.tables if isinstance(optimizer, TableOptimizer) else []
        shared = [live for live in tables if isinstance(live.place.ranks, Ranks)]
        if shared:
            ranks = cast(Ranks, shared[0].place.ranks)
            of_ranks = cast(list[TableOnRanks], shared)
            if look_for_infinities(ranks, of_ranks, inv_scale):
                found.setdefault(_CPU, found_inf.to(_CPU).clone()).fill_(1.0)
            else:
                found.setdefault(_CPU, torch.zeros_like(found_inf, device=_CPU))
        return found

    return watched
