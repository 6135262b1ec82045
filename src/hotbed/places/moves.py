"""Where the rows of a table come to lie: when it is made, and when a module is moved."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from hotbed import _core, devices
from hotbed.places.host.place import in_memory
from hotbed.places.meta import on_meta
from hotbed.places.tiered.place import in_tiers
from hotbed.places.tiered.tiers import Tiers
from hotbed.table.live import LiveTable
from hotbed.table.locks import alone
from hotbed.table.lookups import TiersOfTable
from hotbed.table.place_factory import PlaceFactory
from hotbed.tables import Table

__all__ = ["factory_for", "move", "refuse_move"]


def _by_kernels() -> ModuleType:
    """The places on a device. Only where one is wanted: Triton, which compiles kernels, is an extra."""
    from hotbed.places import by_kernels

    return by_kernels


def factory_for(
    spec: Table,
    *,
    device: torch.device | None = None,
    tiers: TiersOfTable | None = None,
    budget: _core.MemoryBudget | None = None,
) -> PlaceFactory:
    """Return the factory for the place of a new table.

    Args:
        device: where static tables are made whole; None: the host. What cannot be made there is moved
            later, or refused then. "meta": they have no rows yet.
        tiers: of its storage, if that has some.
        budget: of the host's memory, where there are no tiers; None: all of it.

    Raises:
        TableError: there are no kernels.
    """
    if device is not None and device.type == "meta":
        return functools.partial(on_meta, tiers=tiers, budget=budget)
    if isinstance(tiers, Tiers):
        return functools.partial(in_tiers, tiers=tiers)
    if device is None or spec.rows is None:
        return functools.partial(in_memory, budget=budget)
    devices.refuse_without_kernels(spec.name, device)
    return functools.partial(_by_kernels().on_device, device=device, budget=budget)


def refuse_move(live: LiveTable, device: torch.device) -> None:
    """Raises TableError where a table cannot lie on a device, whatever its memory."""
    if devices.has_kernels(device):
        devices.refuse_without_kernels(live.name, device)
        live.place.refuse_device(device, _by_kernels())


def move(live: LiveTable, device: torch.device) -> None:
    """Brings rows and states to a device, or to the host; a gradient that waits is dropped.

    Raises:
        TableError, OutOfMemory: they cannot lie there; the table is as it was.
    """
    live.check_handle()
    with alone([live]):
        live.raise_deferred()
        if not devices.has_kernels(device):
            live.place.move_to_host(live)
            return
        refuse_move(live, device)
        live.place.move_to_device(live, device, _by_kernels())
