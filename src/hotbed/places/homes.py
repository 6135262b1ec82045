"""Where the rows of a new table are to lie."""

from __future__ import annotations

import functools

import torch

from hotbed import _core, devices
from hotbed.places.memory import in_memory
from hotbed.places.place import Home
from hotbed.places.tiered import in_tiers
from hotbed.resolve.tiers import Tiers
from hotbed.tables import Table

__all__ = ["home_of"]


def home_of(
    spec: Table,
    *,
    device: torch.device | None = None,
    tiers: Tiers | None = None,
    budget: _core.MemoryBudget | None = None,
) -> Home:
    """What makes the place of a new table.

    Args:
        device: where static tables are made whole; None: the host. What cannot be made there is moved
            later, or refused then.
        tiers: of its storage, if that has some.
        budget: of the host's memory, where there are no tiers; None: all of it.

    Raises:
        TableError: there are no kernels.
    """
    if tiers is not None:
        return functools.partial(in_tiers, tiers=tiers)
    if device is None or spec.rows is None:
        return functools.partial(in_memory, budget=budget)
    devices.refuse_without_kernels(spec.name, device)
    from hotbed.places.whole import on_device

    return functools.partial(on_device, device=device, budget=budget)
