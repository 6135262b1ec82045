"""The rows of a whole static table in the memory of a device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.device.gradients import DeviceGradient
from hotbed.errors import OutOfMemory, TableError
from hotbed.init import Kind
from hotbed.ops.gpu.rows import KINDS, NO_SLOT, WIDEST
from hotbed.ops.gpu.update import DevicePlanes

if TYPE_CHECKING:
    from hotbed.handles import LiveTable

__all__ = ["WholeRows", "refuse_unless_fit"]

_ROWS_AT_ONCE = 1 << 20


def refuse_unless_fit(live: LiveTable, device: torch.device) -> None:
    """Raises TableError where a table cannot lie on a device, whatever the memory."""
    spec, remedy = live.spec, ""
    if spec.rows is None and live.tiers is None:
        remedy = (
            "it is dynamic, and grows. Give its collection storage=hotbed.Storage(device=..., "
            "host=...), which bounds what lies there"
        )
    elif live.tiers is not None and live.tiers.storage.device is None:
        remedy = "its Storage has no device=, the memory that rows may take there, such as '8GB'"
    elif spec.dtype not in KINDS:
        remedy = "its rows are float64. Use Table(dtype=torch.float32), or leave it on the CPU"
    elif spec.combiner == "max":
        remedy = "its combiner is max. Use sum, mean or sqrtn, or leave it on the CPU"
    elif spec.dim > WIDEST:
        remedy = f"its dim is above {WIDEST}. Split it by columns"
    elif live.follows:
        remedy = (
            'its optimizer brings untouched rows up to date (untouched="exact"). Make the optimizer '
            'with untouched="lazy"'
        )
    if remedy:
        raise TableError(f"Table {live.name!r} cannot be moved to {device}: {remedy}.")


class WholeRows:
    """All rows of a static table, by slot, which is the id.

    Threading: for the training thread. Kernels run on the current stream of the device; reading and
    writing by id waits for it, as it is meant for looking in from outside.

    Attributes:
        device: where they lie.
        weights: (rows, dim) of the table's dtype.
        states: float32 (rows, dim or 1) each, in the order of the rule.
    """

    host_inputs = False
    """Of tests: that ids on the CPU, which stands in for a device, are taken for the host's."""

    def __init__(self, live: LiveTable, device: torch.device, *, first: bool = False) -> None:
        """Copies the rows and states that lie in the core's memory; the core's stay.

        `first`: the core has none; they are first values.

        Raises:
            TableError, OutOfMemory: they cannot lie there.
        """
        refuse_unless_fit(live, device)
        self.device = device
        self.padding_slot = NO_SLOT if live.spec.padding_idx is None else live.spec.padding_idx
        self._name = live.name
        self.states: list[Tensor] = []
        rows, dim = live.spec.rows, live.spec.dim
        assert rows is not None
        self.weights = self._room((rows, dim), live.spec.dtype, "weights")
        if first:
            self.write_first_values(live)
            return
        _copy_by_parts(_core.weights(live.core), self.weights)
        names = live.core.state_names
        for k, (name, width) in enumerate(zip(names, live.core.state_widths(), strict=True)):
            plane = self._room((rows, width), torch.float32, f"state {name}")
            _copy_by_parts(_core.state(live.core, k), plane)
            self.states.append(plane)

    def put_back(self, live: LiveTable) -> None:
        """Copies rows and states into the core's memory, for which the core has made room."""
        _copy_by_parts(self.weights, _core.weights(live.core))
        for k, plane in enumerate(self.states):
            _copy_by_parts(plane, _core.state(live.core, k))

    def make_states(self, live: LiveTable) -> None:
        """Makes the states of the table's rule, at their first values; there may be none."""
        self.states = []
        rule = live.rule
        if rule is None:
            return
        rows, dim = self.weights.shape
        made = []
        for name, one, first in _core.state_planes(rule.options, rule.initial_accumulator_value):
            plane = self._room((rows, 1 if one else dim), torch.float32, f"state {name}")
            made.append(plane.fill_(first))
        self.states = made

    def nothing_waiting(self) -> DeviceGradient:
        """What keeps gradients of a table here."""
        return DeviceGradient()

    def is_here(self, ids: Tensor) -> bool:
        """Whether ids need not be brought, and are checked, on the device."""
        return ids.device == self.device and not self.host_inputs

    def moved_to(self, device: torch.device) -> WholeRows:
        """The same rows on another device."""
        other = copy.copy(self)
        other.device = device
        other.weights = self.weights.to(device)
        other.states = [state.to(device) for state in self.states]
        return other

    def slots(self, live: LiveTable) -> int:
        """Slots lie below it."""
        return len(self.weights)

    def planes(self, live: LiveTable) -> DevicePlanes:
        """What kernels take."""
        return DevicePlanes(weights=self.weights, states=self.states, key=live.key)

    def read(self, ids: Tensor) -> Tensor:
        """(n, dim) rows of (n,) int64 ids on the host or the device, on the device."""
        return self.weights[ids.to(self.device)]

    def write(self, ids: Tensor, values: Tensor) -> None:
        """Overwrites rows; of duplicates the last wins."""
        ids, last = _last_of_each(ids)
        values = values if last is None else values[last]
        values = values.to(self.device, self.weights.dtype)
        self.weights.index_copy_(0, ids.to(self.device), values)

    def write_first_values(self, live: LiveTable) -> None:
        """Every row is its first value again; states stay."""
        kind, value = live.spec.distribution()[:2]
        if kind == Kind.constant:
            self.weights.fill_(value)
            if live.spec.padding_idx is not None:
                self.weights[live.spec.padding_idx] = 0
            return
        for begin in range(0, len(self.weights), _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, len(self.weights))
            ids = torch.arange(begin, end, device="cpu")
            # The core has no rows any more, so what it tells are first values.
            self.weights[begin:end] = _core.lookup(live.core, ids.data_ptr(), len(ids))

    def read_states(self, ids: Tensor) -> list[Tensor]:
        """Of (n,) ids, on the host."""
        at = ids.to(self.device)
        return [state[at].cpu() for state in self.states]

    def write_states(self, ids: Tensor, values: Sequence[Tensor]) -> None:
        """Overwrites states; of duplicates the last wins."""
        ids, last = _last_of_each(ids)
        at = ids.to(self.device)
        for state, value in zip(self.states, values, strict=True):
            value = value if last is None else value[last]
            state.index_copy_(0, at, value.to(self.device))

    def reset_states(self, firsts: Sequence[float]) -> None:
        """Gives all rows the first values of their states."""
        for state, first in zip(self.states, firsts, strict=True):
            state.fill_(first)

    @property
    def state_bytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def _room(self, shape: tuple[int, int], dtype: torch.dtype, part: str) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            needed = shape[0] * shape[1] * dtype.itemsize
            raise OutOfMemory(
                f"Table {self._name!r}, {part}: {self.device} has no room for {needed:,} bytes. Give "
                "its collection storage=hotbed.Storage(device=..., host=...), which keeps there what "
                f"fits, or use a smaller dtype or dim. ({str(error).splitlines()[0]})"
            ) from None


def _copy_by_parts(source: Any, target: Any) -> None:
    """A copy between devices without another one of all of it on the way."""
    for begin in range(0, len(source), _ROWS_AT_ONCE):
        target[begin : begin + _ROWS_AT_ONCE].copy_(source[begin : begin + _ROWS_AT_ONCE])


def _last_of_each(ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Distinct ids, and the position of the last of each; None: all of them, as they are."""
    host = ids.cpu()
    found, inverse = torch.unique(host, return_inverse=True)
    if len(found) == len(host):
        return ids, None
    last = torch.zeros_like(found)
    last.scatter_reduce_(0, inverse, torch.arange(len(host)), "amax")
    return found, last.to(ids.device)
