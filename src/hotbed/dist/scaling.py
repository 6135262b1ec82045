"""GradScaler on ranks: all of them skip a step, or none."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from hotbed.dist.clipping import look_for_infinities
from hotbed.dist.declarations import of_scaler
from hotbed.dist.ranks import Ranks
from hotbed.dist.shards import TableOnRanks
from hotbed.optim.base import TableOptimizer

__all__ = ["watch_scalers"]

_CPU = torch.device("cpu")
_WATCHED = "_hotbed_watched"
_Unscale = Callable[..., dict[torch.device, Tensor]]
_asking = contextvars.ContextVar("a GradScaler asks all ranks", default=False)


def watch_scalers() -> None:
    """From now on, a GradScaler that unscales the gradients of tables on ranks asks all ranks for infinities.

    It has no hook for that; what it keeps of infinities is what its ``_unscale_grads_`` returns. What others
    have put in its place before or after is called, too, and that of subclasses, of now and later ones.
    """
    pending: list[type[GradScaler]] = [GradScaler]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        _watch(kind)
    if "__init_subclass__" not in vars(GradScaler):
        GradScaler.__init_subclass__ = classmethod(_watch_new)  # type: ignore[assignment]


def _watch_new(kind: type[GradScaler], /, **options: object) -> None:
    """Watch a class that is being made, of which other bases hear as before."""
    super(GradScaler, kind).__init_subclass__(**options)
    _watch(kind)


def _watch(kind: type[GradScaler]) -> None:
    """Watch what a class has of its own."""
    own: _Unscale | None = vars(kind).get("_unscale_grads_")
    if own is not None and not hasattr(own, _WATCHED):
        kind._unscale_grads_ = _watched(own)  # type: ignore[method-assign]


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
        tables = optimizer.tables if isinstance(optimizer, TableOptimizer) else []
        shared = [live for live in tables if isinstance(live.place.ranks, Ranks)]
        if not shared or _asking.get():  # a subclass calls its base
            return unscale(self, optimizer, inv_scale, found_inf, *args, **options)
        found: dict[torch.device, Tensor] = {}

        def unscale_here() -> bool:
            found.update(unscale(self, optimizer, inv_scale, found_inf, *args, **options))
            return any(bool(flag) for flag in found.values())

        asking = _asking.set(True)
        try:
            is_bad = look_for_infinities(
                cast(Ranks, shared[0].place.ranks),
                cast(list[TableOnRanks], shared),
                float(inv_scale),
                of_scaler(self.state_dict()),
                unscale_here,
            )
        finally:
            _asking.reset(asking)
        if is_bad:
            found.setdefault(_CPU, found_inf.to(_CPU).clone()).fill_(1.0)
        else:
            found.setdefault(_CPU, torch.zeros_like(found_inf, device=_CPU))
        return found

    setattr(watched, _WATCHED, True)
    return watched
