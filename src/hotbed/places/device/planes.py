"""Planes: what kernels need of a place."""

from __future__ import annotations

from typing import Protocol, cast

import torch

from hotbed.ops.gpu.update import DevicePlanes
from hotbed.table.lookups import StoredTable

__all__ = ["PlanesOnDevice", "there"]


class PlanesOnDevice(Protocol):
    """A place on a device.

    Attributes:
        padding_slot: whose row is padding.
        slots: slots lie below it.
    """

    device: torch.device

    @property
    def padding_slot(self) -> int: ...
    @property
    def slots(self) -> int: ...

    def planes(self) -> DevicePlanes:
        """Return the planes that kernels take."""


def there(live: StoredTable) -> PlanesOnDevice:
    """The place of a table that lies on a device."""
    return cast(PlanesOnDevice, live.place)
