"""Where a table's rows lie: in the core's memory, or in that of a device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import TableError
from hotbed.gradients import WaitingGradient, plain_access
from hotbed.holds import alone
from hotbed.parameters import FollowingHandle, Handle, OpenHandle
from hotbed.tables import MAX_DIM, Table

if TYPE_CHECKING:
    from hotbed.resolve.tiers import Tiers

__all__ = ["OPEN_ROWS", "Placed", "refuse_mixed_places"]

# Rows that the handle of a dynamic table claims to have: more than can be, and few enough that the
# count of bytes stays below 2**63 for any dim.
OPEN_ROWS = 2**59 // MAX_DIM

_CPU = torch.device("cpu")


def named_device(device: Any) -> torch.device | None:
    """The device that is meant, with its number; None: the host.

    Raises:
        TableError: what names no device, or one that is not there.
    """
    if device is None:
        return None
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise TableError(f'device={device!r} names no device; give "cpu" or "cuda".') from None
    if device.type == "cpu":
        return device if Placed.stands_in(device) else None
    if device.type != "cuda":
        raise TableError(
            f"device={str(device)!r} cannot be honoured; tables lie on the CPU or on a CUDA device."
        )
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise TableError(
            f"device={str(device)!r} is not there: torch.cuda.device_count() is "
            f"{torch.cuda.device_count()} ({str(error).splitlines()[0].rstrip('.')}). Leave device= out, "
            "and tables lie on the CPU; a GPU needs a torch that is built for CUDA, and a driver."
        ) from error


class Placed:
    """What a live table knows of the place of its rows."""

    spec: Table
    core: _core.Table
    tiers: Tiers | None
    aliased: bool
    device_rows: Any
    """What keeps the rows where they lie on a device; None: the core does."""
    place: Any
    """Tables that serve one call are in equal places."""
    address: int
    shape: torch.Size
    _data: Tensor

    if TYPE_CHECKING:

        @property
        def parameter(self) -> Handle: ...
        @property
        def follows(self) -> bool: ...
        def weights(self) -> Tensor: ...
        def check_handle(self) -> None: ...
        def settle(self) -> None: ...
        def __len__(self) -> int: ...
        @property
        def name(self) -> str: ...

    def _place(self) -> Any:
        if self.tiers is not None:
            return self.tiers
        return "memory" if self.device_rows is None else str(self.device)

    def _handle_kind(self) -> type[Handle]:
        if not self.aliased:
            return OpenHandle
        return FollowingHandle if self.follows else Handle

    def _handle_data(self) -> Tensor:
        if self.aliased:
            return self.weights()
        # Slots of a tiered table are those of all tables that share its row space.
        rows = OPEN_ROWS if self.spec.rows is None or self.tiers is not None else self.spec.rows
        device = "cpu" if self.device_rows is None else self.device_rows.device
        nothing = torch.full((), float("nan"), dtype=self.spec.compute_dtype, device=device)
        return nothing.expand(rows, self.spec.dim)

    @property
    def _live(self) -> Any:
        return self

    @property
    def device(self) -> torch.device:
        """Where its vectors come out."""
        return _CPU if self.device_rows is None else self.device_rows.device

    @property
    def where(self) -> str:
        """For errors."""
        return f"{'the tiers of a Storage on ' if self.tiers is not None else ''}{self.device}"

    @property
    def waiting(self) -> Any:
        """The gradient that waits for a step. The handle keeps it, as it keeps tables."""
        return self.parameter.waiting

    def nothing_waiting(self) -> WaitingGradient:
        """What is to keep gradients where the rows lie."""
        return WaitingGradient() if self.device_rows is None else self.device_rows.nothing_waiting()

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits for a step, without summing it."""
        parameter = self.parameter
        return parameter.waiting.waits(parameter)

    def drop_gradient(self) -> None:
        """Forgets it, without summing it."""
        parameter = self.parameter
        parameter.waiting.drop(parameter)

    def refuse_move(self, device: torch.device) -> None:
        """Raises TableError where the table cannot lie on a device, whatever its memory."""
        if device.type != "cpu" or self.stands_in(device):
            if importlib.util.find_spec("triton") is None:
                raise TableError(
                    f"Table {self.name!r} cannot be moved to {device}: Triton, which compiles the "
                    "kernels, is not installed. pip install triton."
                )
            from hotbed.device.rows import refuse_unless_fit

            refuse_unless_fit(self._live, device)

    def _rows_on(self, device: Any) -> Any:
        """First values, made on a device.

        Raises:
            TableError, OutOfMemory: they cannot lie there.
        """
        self.refuse_move(device)
        from hotbed.device.rows import WholeRows

        return WholeRows(self._live, device, first=True)

    def move_to(self, device: torch.device) -> None:
        """Brings rows and states to a device, or to the host; a gradient that waits is dropped.

        Raises:
            TableError, OutOfMemory: they cannot lie there; the table is as it was.
        """
        self.check_handle()
        with alone([self]):
            self._move_to(device)

    def _move_to(self, device: torch.device) -> None:
        self.wait_for_device()
        if device.type == "cpu" and not self.stands_in(device):
            self._move_home()
            return
        if self.tiers is not None:
            self.tiers.move_to(device)
            return
        from hotbed.device.rows import WholeRows

        if self.device_rows is not None:
            rows = self.device_rows.moved_to(device)
        else:
            rows = WholeRows(self._live, device)
            self.core.release_rows()
        self.adopt(rows)

    def _move_home(self) -> None:
        rows = self.device_rows
        if rows is None:
            return
        if self.tiers is not None:
            self.tiers.move_to(None)
            return
        self.core.take_rows_back()
        rows.put_back(self)
        self.adopt(None)

    def adopt(self, rows: Any) -> None:
        """Rows lie elsewhere from now on; a gradient that waits is dropped."""
        self.drop_gradient()
        self.device_rows = rows
        self.place = self._place()
        parameter = self.parameter
        parameter.waiting = self.nothing_waiting()
        self._data = self._handle_data()
        self.address, self.shape = self._data.data_ptr(), self._data.shape
        with plain_access():
            parameter.data = self._data
        parameter.__class__ = self._handle_kind()

    @staticmethod
    def stands_in(device: torch.device) -> bool:
        """Whether the CPU is to be taken for a device, by kernels that are interpreted (tests)."""
        variants = sys.modules.get("hotbed.ops.gpu.variants")
        return variants is not None and device.type in variants.DEVICES

    def wait_for_device(self) -> None:
        """Raises what an earlier step was refused for, before somebody looks at rows."""
        if self.device_rows is not None:
            from hotbed.device.notices import raise_what_is_known

            raise_what_is_known([self._live], wait=True)

    def memory(self) -> dict[str, int]:
        """Bytes of this table by what they hold; in tiers, of its rows wherever they lie."""
        self.settle()
        rows = len(self)
        weights = rows * self.spec.dim * self.spec.dtype.itemsize
        if self.tiers is not None:
            states = rows * sum(self.core.state_widths()) * self.spec.compute_dtype.itemsize
            total = weights + states
            return {
                "rows": rows,
                "weights": weights,
                "states": states,
                "index": 0,
                "total": total,
            }
        planes, index = int(self.core.plane_bytes), int(self.core.index_bytes)
        if self.device_rows is not None:
            planes = weights + self.device_rows.state_bytes
        return {
            "rows": rows,
            "weights": weights,
            "states": planes - weights,
            "index": index,
            "total": planes + index,
        }


def refuse_mixed_places(tables: Mapping[str, Placed]) -> None:
    """Raises TableError unless tables, by the names that errors are to use, can serve one call."""
    (name, first), *others = tables.items()
    for other_name, other in others:
        if other.place == first.place:
            continue
        if first.tiers is not None and other.tiers is not None:
            raise TableError(
                f"Tables {name!r} and {other_name!r} have Storage of their own each, and one call "
                "cannot serve both. Make one EmbeddingCollection of them with one Storage."
            )
        raise TableError(
            f"Tables {name!r} and {other_name!r} of one module lie in different places: "
            f"{first.where} and {other.where}. Move the whole module, or leave one out of it."
        )
