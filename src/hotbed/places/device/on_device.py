"""Base of places on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from hotbed import _core
from hotbed.errors import OptimizerError, TableError
from hotbed.ops.gpu.rows import KINDS, WIDEST
from hotbed.places.device.deferred_errors import raise_deferred_errors
from hotbed.places.device.gradients import DeviceGradient
from hotbed.places.device.participant import DeviceParticipant
from hotbed.table.lookups import Lookups, StoredTable
from hotbed.table.participant import SteppingOptimizer
from hotbed.table.place import Place
from hotbed.tables import Table

__all__ = ["DeviceLookups", "OnDevice", "remedy_on_device"]


def remedy_on_device(core: _core.Table, spec: Table) -> str:
    """Return the reason why a table cannot lie on a device, with the remedy; "" if it can."""
    if spec.dtype not in KINDS:
        return "its rows are float64. Use Table(dtype=torch.float32), or leave it on the CPU"
    if spec.combiner == "max":
        return "its combiner is max. Use sum, mean or sqrtn, or leave it on the CPU"
    if spec.dim > WIDEST:
        return f"its dim is above {WIDEST}. Split it by columns"
    if spec.origin.is_cut and spec.dtype in (torch.float16, torch.bfloat16):
        return "it is a part of a table, and rounds its 16-bit rows on the CPU only"
    if core.catches_up:
        return (
            'its optimizer brings untouched rows up to date (untouched="exact"). Make the optimizer with '
            'untouched="lazy"'
        )
    return ""


class DeviceLookups(Lookups):
    """Tables whose rows kernels compute on; what they find out comes to the host later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def raise_deferred(
        self, live: Sequence[StoredTable], *, training: bool = True, wait: bool = False
    ) -> None:
        raise_deferred_errors(live, training=training, wait=wait)

    def without_autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, enabled=False)


class OnDevice(Place):
    """Kernels compute on its rows; what they find out comes to the host later."""

    unscales = True

    @property
    def stepped_with(self) -> torch.device:
        return self.device

    def make_participant(
        self, optimizer: SteppingOptimizer, tables: Sequence[StoredTable]
    ) -> DeviceParticipant:
        return DeviceParticipant(optimizer, tables)

    def refuse_to_share(self) -> None:
        raise TableError(
            f"Table {self.core.name!r} lies on {self.device}; ranks share tables on their hosts so far. "
            "Distribute the model before it is moved, and move its dense layers only."
        )

    def nothing_waiting(self) -> DeviceGradient:
        return DeviceGradient()

    def refuse_exact(self, optimizer: str) -> None:
        raise OptimizerError(
            f'{optimizer} with untouched="exact": table {self.core.name!r} lies on {self.device}, where '
            'rows are not brought up to date. Use untouched="lazy", or leave the table on the CPU.'
        )
