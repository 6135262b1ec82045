"""Rows in tiers of which the uppermost is the memory of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch

from hotbed import _core
from hotbed.errors import TableError
from hotbed.inputs.bags import Bags
from hotbed.ops.gpu.rows import NO_SLOT
from hotbed.ops.gpu.update import DevicePlanes
from hotbed.places.device.batch import DeviceResolved
from hotbed.places.device.on_device import DeviceLookups, OnDevice, remedy_on_device
from hotbed.places.tiered.batch import resolve_in_tiers
from hotbed.places.tiered.place import Tiered
from hotbed.places.tiered.tiers import Tiers
from hotbed.places.tiered_device.batch import TieredBatch, arrived
from hotbed.places.tiered_device.spaces import Side, SpaceOnDevice, SpacesOnDevice
from hotbed.storage import Storage
from hotbed.table.lookups import Call, CallAhead, StoredTable
from hotbed.table.place import MovedTable, Place
from hotbed.table.prefetch import BatchAhead
from hotbed.table.records import Records
from hotbed.tables import Table

__all__ = ["TieredOnDevice", "place_on", "refuse_tiered"]


def refuse_tiered(core: _core.Table, spec: Table, storage: Storage, device: torch.device) -> None:
    """Raises TableError where a table in tiers cannot lie on a device, whatever the memory."""
    remedy = remedy_on_device(core, spec)
    if storage.device is None:
        remedy = "its Storage has no device=, the memory that rows may take there, such as '8GB'"
    if remedy:
        raise TableError(f"Table {core.name!r} cannot be moved to {device}: {remedy}.")


def place_on(
    tiers: Tiers, device: torch.device
) -> tuple[SpacesOnDevice, Callable[[_core.Table, Table], Place]]:
    """Planes on a device, and what makes places of them; for `Tiers.move_to`."""
    spaces = SpacesOnDevice(device)
    lookups = DeviceTiers(tiers, spaces.side)
    return spaces, lambda core, spec: TieredOnDevice(core, spec, lookups)


class DeviceTiers(DeviceLookups):
    """Tables of one group whose rows lie in tiers, the uppermost of them a device's memory."""

    def __init__(self, tiers: Tiers, side: Side) -> None:
        super().__init__(side.device)
        self._tiers, self.side = tiers, side

    @property
    def tiers(self) -> Tiers:
        return self._tiers

    @property
    def prefetcher(self) -> Tiers:
        return self._tiers

    @property
    def where(self) -> str:
        return f"the tiers of a Storage on {self.device}"

    def allocate(self, live: Sequence[StoredTable]) -> None:
        self.tiers.allocate(live)

    def are_allocated(self, live: Sequence[StoredTable]) -> bool:
        return self.tiers.are_allocated(live)

    def records(
        self, live: Sequence[StoredTable], *, states: bool, current: bool
    ) -> Iterator[tuple[int, Records]]:
        return self.tiers.records(live, states=states, current=current)

    def stats(self, live: Sequence[StoredTable]) -> dict[str, float]:
        return self.tiers.stats(live)

    def flush(self, live: Sequence[StoredTable]) -> None:
        self.tiers.flush(live)

    def note_hottest(self, live: Sequence[StoredTable]) -> None:
        self.tiers.note_hottest(live)

    def make_batch(
        self, live: Sequence[StoredTable], table_of: Sequence[int], bags: Sequence[Bags]
    ) -> TieredBatch:
        return TieredBatch(live, table_of, bags, self.tiers, self.side)

    def prepare(self, call: CallAhead) -> BatchAhead:
        return self.tiers.prepare(call)

    def resolve(self, call: Call) -> DeviceResolved:
        made = self.make_batch(call.live, call.table_of, call.bags)
        batch, _, _ = resolve_in_tiers(self.tiers, made, call)
        assert isinstance(batch, TieredBatch)
        return arrived(batch, call, self.device)


class TieredOnDevice(OnDevice, Tiered):
    """Tables of one storage share slots.

    Threading: for the training thread.
    """

    padding_slot = NO_SLOT
    """Padding has none."""

    def __init__(self, core: _core.Table, spec: Table, lookups: DeviceTiers) -> None:
        super().__init__(core, spec, lookups)
        self.side = lookups.side

    # -- lookups ---------------------------------------------------------------------------------

    @property
    def space(self) -> SpaceOnDevice:
        """Device planes of this table's row space."""
        space = _core.planes_of(self.core)
        assert isinstance(space, SpaceOnDevice)
        return space

    def planes(self) -> DevicePlanes:
        """Return the planes that kernels take; tables of equal records have planes in common."""
        space = self.space
        return DevicePlanes(
            weights=space.weights, states=space.states, ids=space.ids, key=self.core.key
        )

    @property
    def slots(self) -> int:
        """Slots lie below it."""
        return len(self.space.weights)

    # -- moving ----------------------------------------------------------------------------------

    def move_to_device(
        self, live: MovedTable, device: torch.device, by_kernels: ModuleType
    ) -> None:
        if device != self.device:
            super().move_to_device(live, device, by_kernels)

    def move_to_host(self, live: MovedTable) -> None:
        """All tables of the storage go along."""
        self.tiers.move_to(None, lambda core, spec: Tiered(core, spec, self.tiers))
