"""A whole static table in the memory of a device: an id is its slot."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import OutOfMemory, TableError
from hotbed.init import Kind
from hotbed.ops.gpu.rows import NO_SLOT
from hotbed.ops.gpu.update import DevicePlanes
from hotbed.places.device.batch import DeviceResolved, resolve_whole
from hotbed.places.device.on_device import DeviceLookups, OnDevice, remedy_on_device
from hotbed.places.host.place import Memory, in_memory_again
from hotbed.table.lookups import Call
from hotbed.table.place import MovedTable
from hotbed.table.place_factory import PlaceFactory, make_core
from hotbed.table.records import Records, rows_at_once
from hotbed.tables import Table

__all__ = [
    "WholeOnDevice",
    "bring",
    "on_device",
    "refuse_whole",
]

_ROWS_AT_ONCE = 1 << 20


def refuse_whole(core: _core.Table, spec: Table, device: torch.device) -> None:
    """Raises TableError where a table cannot lie on a device whole, whatever the memory."""
    remedy = remedy_on_device(core, spec)
    if spec.rows is None:
        remedy = (
            "it is dynamic, and grows. Give its collection storage=hotbed.Storage(device=..., "
            "host=...), which bounds what lies there"
        )
    if remedy:
        raise TableError(f"Table {core.name!r} cannot be moved to {device}: {remedy}.")


def on_device(
    spec: Table, key: int, device: torch.device, budget: _core.MemoryBudget | None = None
) -> WholeOnDevice:
    """A `PlaceFactory`: rows are made there.

    Raises:
        TableError, OutOfMemory: they cannot lie there.
    """
    made = WholeOnDevice(make_core(spec, key, elsewhere=True, budget=budget), spec, device, budget)
    made.forget()
    return made


def bring(live: MovedTable, device: torch.device) -> None:
    """Brings a table in the core's memory to a device."""
    assert isinstance(live.place, Memory)
    there = WholeOnDevice.copied(live.place, device)
    live.core.release_rows()
    live.adopt(there)


class WholeLookups(DeviceLookups):
    """Static tables that lie on one device whole."""

    def resolve(self, call: Call) -> DeviceResolved:
        return resolve_whole(call, self.device, self.is_here)

    def is_here(self, ids: Tensor) -> bool:
        """True if ids need not be brought, and are checked on the device."""
        return ids.device == self.device


@functools.cache
def whole_on(device: torch.device) -> WholeLookups:
    """Return the one of a device."""
    return WholeLookups(device)


class WholeOnDevice(OnDevice):
    """All rows, by slot.

    Threading: for the training thread. Kernels run on the current stream of the device; reading and
    writing by id waits for it, as it is meant for looking in from outside.

    Attributes:
        plane: (rows, dim) of the table's dtype.
        states: float32 (rows, dim or 1) each, in the order of the rule.
    """

    def __init__(
        self,
        core: _core.Table,
        spec: Table,
        device: torch.device,
        budget: _core.MemoryBudget | None = None,
    ) -> None:
        """Room for the weights.

        Raises:
            TableError, OutOfMemory: they cannot lie there.
        """
        super().__init__(core, spec, whole_on(device), budget)
        refuse_whole(core, spec, device)
        self.padding_slot = NO_SLOT if spec.padding_idx is None else spec.padding_idx
        self.states: list[Tensor] = []
        assert spec.rows is not None
        self.plane = self._room((spec.rows, spec.dim), spec.dtype, "weights")

    @classmethod
    def copied(cls, rows: Memory, device: torch.device) -> WholeOnDevice:
        """A copy of rows and states that lie in the core's memory."""
        core = rows.core
        made = cls(core, rows.spec, device, rows.budget)
        for name, width in zip(core.state_names, core.state_widths(), strict=True):
            made.states.append(made._room((len(made.plane), width), torch.float32, f"state {name}"))
        for some in rows.records():
            made.write(some)
        return made

    # -- lookups ---------------------------------------------------------------------------------

    def planes(self) -> DevicePlanes:
        """Return the planes that kernels take."""
        return DevicePlanes(weights=self.plane, states=self.states, key=self.core.key)

    @property
    def slots(self) -> int:
        """Slots lie below it."""
        return len(self.plane)

    @property
    def recorded_on(self) -> torch.device:  # type: ignore[override]
        return self.device

    # -- the handle ------------------------------------------------------------------------------

    @property
    def aliased(self) -> bool:
        return True

    def handle_data(self) -> Tensor:
        return self.plane

    # -- rows ------------------------------------------------------------------------------------

    def weights(self) -> Tensor:
        return self.plane

    def read(self, ids: Tensor) -> Tensor:
        return self.plane[ids.to(self.device)]

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        at_once = rows_at_once(self.core)
        for begin in range(0, len(self.plane), at_once):
            end = min(begin + at_once, len(self.plane))
            of_states = [state[begin:end].cpu() for state in self.states] if states else None
            ids = torch.arange(begin, end, device="cpu")
            yield Records(ids, self.plane[begin:end].cpu(), of_states)

    def write(self, records: Records) -> None:
        ids, last = _last_of_each(records.ids)
        at = ids.to(self.device)
        given: list[Tensor | None] = [records.weights, *(records.states or ())]
        for plane, values in zip([self.plane, *self.states], given, strict=False):
            if values is not None:
                chosen = values if last is None else values[last.to(values.device)]
                plane.index_copy_(0, at, chosen.to(device=self.device, dtype=plane.dtype))

    def erase(self, ids: Tensor) -> int:
        # The core has no rows any more, so what it tells are first values.
        firsts = _core.read_rows(self.core, ids.data_ptr(), len(ids))
        values = [
            torch.full((len(ids), state.shape[1]), first)
            for state, first in zip(self.states, self.core.state_firsts, strict=True)
        ]
        self.write(Records(ids, firsts, values))
        return len(ids)

    def forget(self) -> None:
        """States stay."""
        (_, kind, value, *_), *others = self.spec.bands()
        if kind == Kind.constant and not others:
            self.plane.fill_(value)
            if self.spec.padding_idx is not None:
                self.plane[self.spec.padding_idx] = 0
            return
        for begin in range(0, len(self.plane), _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, len(self.plane))
            ids = torch.arange(begin, end, device="cpu")
            # The core has no rows any more, so what it tells are first values.
            self.plane[begin:end] = _core.read_rows(self.core, ids.data_ptr(), len(ids))

    def memory(self) -> dict[str, int]:
        states = sum(state.nbytes for state in self.states)
        index = int(self.core.index_bytes)
        return {
            "rows": len(self.plane),
            "weights": self.plane.nbytes,
            "states": states,
            "index": index,
            "total": self.plane.nbytes + states + index,
        }

    # -- states ----------------------------------------------------------------------------------

    def make_states(self, rule: _core.TableRule | None) -> None:
        self.states = []
        if rule is None:
            return
        rows, dim = self.plane.shape
        made = []
        for name, one, first in _core.state_planes(rule.options, rule.initial_accumulator_value):
            plane = self._room((rows, 1 if one else dim), torch.float32, f"state {name}")
            made.append(plane.fill_(first))
        self.states = made

    def reset_states(self, rule: _core.TableRule, firsts: Sequence[float]) -> None:
        for state, first in zip(self.states, firsts, strict=True):
            state.fill_(first)

    # -- moving ----------------------------------------------------------------------------------

    def for_copy(
        self, memo: dict[int, object] | None
    ) -> tuple[PlaceFactory, Callable[[MovedTable], None] | None]:
        """By way of the host: beside both tables nothing lies on the device."""
        return in_memory_again(self.budget, memo), functools.partial(bring, device=self.device)

    def refuse_device(self, device: torch.device, by_kernels: ModuleType) -> None:
        refuse_whole(self.core, self.spec, device)

    def move_to_device(
        self, live: MovedTable, device: torch.device, by_kernels: ModuleType
    ) -> None:
        if device == self.device:
            return
        there = copy.copy(self)
        there.lookups, there.device = whole_on(device), device
        there.plane = self.plane.to(device)
        there.states = [state.to(device) for state in self.states]
        live.adopt(there)

    def move_to_host(self, live: MovedTable) -> None:
        self.core.take_rows_back()
        there = Memory(self.core, self.spec, self.budget)
        for some in self.records():
            there.write(some)
        live.adopt(there)

    def _room(self, shape: tuple[int, int], dtype: torch.dtype, part: str) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            needed = shape[0] * shape[1] * dtype.itemsize
            raise OutOfMemory(
                f"Table {self.core.name!r}, {part}: {self.device} has no room for {needed:,} bytes. Give "
                "its collection storage=hotbed.Storage(device=..., host=...), which keeps there what "
                f"fits, or use a smaller dtype or dim. ({str(error).splitlines()[0]})"
            ) from None


def _last_of_each(ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Distinct ids, and the position of the last of each; None: all of them, as they are."""
    host = ids.cpu()
    found, inverse = torch.unique(host, return_inverse=True)
    if len(found) == len(host):
        return ids, None
    last = torch.zeros_like(found)
    last.scatter_reduce_(0, inverse, torch.arange(len(host)), "amax")
    return found, last.to(ids.device)
