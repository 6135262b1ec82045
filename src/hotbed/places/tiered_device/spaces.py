"""Planes of row spaces in the memory of a device, and the stream on which their rows move.

The core moves rows of tables in tiers as records. Here a record passes page-locked memory and a
staging block on the device, from where it is taken apart into planes; and back. All of it happens on
a stream of its own. That stream waits, by an event, for what the training thread has launched so
far, since rows that it was given to move may have been written, or read, by that. Nothing waits for
the host but the thread that asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import StorageError

__all__ = ["Side", "SpaceOnDevice", "SpacesOnDevice", "host_memory"]

_DTYPES = {
    _core.DType.f32: torch.float32,
    _core.DType.f16: torch.float16,
    _core.DType.bf16: torch.bfloat16,
}
_ROWS_AT_ONCE = 8192  # what the core moves at once; more are moved in blocks
_STAGING_BYTES = 32 << 20


class Side:
    """The stream on which rows and batches travel, beside the one that computes.

    Threading: any number; the core lets one thread at a time move rows. On a device that is none
    (the CPU in its place) everything happens at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._real = device.type == "cuda"
        self.compute: torch.cuda.Stream | None = None
        """The stream that computes, as the training thread last said."""
        self._trainer = threading.get_ident()
        self._moved: torch.cuda.Event | None = None
        if self._real:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.compute = torch.cuda.current_stream(device)

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Run launches inside on the stream."""
        return torch.cuda.stream(self.stream) if self._real else contextlib.nullcontext()

    def pinned(self, elements: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Memory of the host that the device can copy from and to beside other work."""
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=self._real)

    def train_here(self) -> None:
        """Said by the training thread: its current stream computes. It waits there for rows that it
        has itself had moved."""
        self._trainer = threading.get_ident()
        self.compute_here()

    def compute_here(self) -> None:
        """The same said by a thread of autograd, where a backward brings rows up."""
        if not self._real:
            return
        self.compute = torch.cuda.current_stream(self.device)
        if self._moved is not None:
            self.compute.wait_event(self._moved)
            self._moved = None

    def wait_for_compute(self) -> None:
        """The stream waits for what is launched so far on the one that computes."""
        if self._real:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.compute)
            self.stream.wait_event(event)

    def mark(self) -> torch.cuda.Event | None:
        """An event behind what is launched so far on the stream; None where there is none."""
        if not self._real:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def moved(self, event: torch.cuda.Event | None) -> None:
        """Rows were moved; by the training thread, outside of any batch, it must wait for them."""
        if self._real and threading.get_ident() == self._trainer:
            self._moved = event

    def use(self, tensors: Sequence[Tensor], arrived: torch.cuda.Event | None) -> None:
        """The stream that computes waits until the tensors, which were made here, have arrived."""
        if self.compute is not None and arrived is not None:
            self.compute.wait_event(arrived)
            for tensor in tensors:
                tensor.record_stream(self.compute)


class SpacesOnDevice:
    """Makes the planes of every row space of one storage. The core keeps it.

    Threading: for the training thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.side = device, Side(device)

    def __call__(
        self, dim: int, dtype: _core.DType, widths: Sequence[int], capacity: int
    ) -> SpaceOnDevice:
        try:
            return SpaceOnDevice(self.side, dim, _DTYPES[dtype], widths, capacity)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise StorageError(
                f"{self.device} has no room for the {capacity:,} rows that Storage(device=...) allows. "
                f"Lower it. ({str(error).splitlines()[0]})"
            ) from None


class SpaceOnDevice:
    """The planes of one row space: weights, states, and for stochastic rounding ids, by slot.

    Threading: as csrc/tiers/row_planes.hpp; kernels of the training thread use the planes meanwhile, but not
    the slots that move.
    """

    def __init__(
        self, side: Side, dim: int, dtype: torch.dtype, widths: Sequence[int], capacity: int
    ) -> None:
        self.side, device = side, side.device
        self.weights = torch.empty((capacity, dim), dtype=dtype, device=device)
        self.states = [torch.empty((capacity, width), device=device) for width in widths]
        self.ids: Tensor | None = None
        if dtype.itemsize == 2:
            self.ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        # Rows move as the largest integers that their parts are made of.
        planes = [self.weights, *self.states]
        sizes = [plane.shape[1] * plane.itemsize for plane in planes]
        unit = torch.int32 if all(size % 4 == 0 for size in sizes) else torch.int16
        self._parts: list[tuple[Tensor, int, int]] = []
        begin = 0
        for plane, size in zip(planes, sizes, strict=True):
            end = begin + size // unit.itemsize
            self._parts.append((plane.view(unit), begin, end))
            begin = end
        self._record_bytes = begin * unit.itemsize
        rows = max(1, min(capacity, _ROWS_AT_ONCE, _STAGING_BYTES // self._record_bytes))
        self._staging = torch.empty((rows, begin), dtype=unit, device=device)
        self._records = side.pinned(rows * begin, unit).view(rows, begin)
        self._slots = side.pinned(rows)
        self._copied: torch.cuda.Event | None = None  # behind the last use of what is page-locked

    def gather(self, slots: int, n: int, records: int) -> None:
        """`records` (address) becomes those of n `slots` (address of int64)."""
        self.side.wait_for_compute()
        for begin, count in self._blocks(n):
            with self.side.entered():
                at = self._bring_slots(slots + 8 * begin, count)
                block = self._staging[:count]
                for plane, first, last in self._parts:
                    block[:, first:last] = plane.index_select(0, at)
                self._records[:count].copy_(block, non_blocking=True)
            self._copied = self.side.mark()
            self._wait()
            self._given(records, begin, count).copy_(self._packed(count))

    def scatter(self, records: int, slots: int, n: int) -> None:
        """The way back."""
        self.side.wait_for_compute()
        for begin, count in self._blocks(n):
            self._wait()
            self._packed(count).copy_(self._given(records, begin, count))
            with self.side.entered():
                at = self._bring_slots(slots + 8 * begin, count)
                block = self._staging[:count]
                block.copy_(self._records[:count], non_blocking=True)
                for plane, first, last in self._parts:
                    plane.index_copy_(0, at, block[:, first:last])
            self._copied = self.side.mark()
        self.side.moved(self._copied)

    def _packed(self, count: int) -> Tensor:
        return self._records.view(torch.uint8).view(-1)[: count * self._record_bytes]

    def _given(self, records: int, begin: int, count: int) -> Tensor:
        return host_memory(records + begin * self._record_bytes, count * self._record_bytes)

    def _blocks(self, n: int) -> list[tuple[int, int]]:
        rows = len(self._staging)
        return [(begin, min(rows, n - begin)) for begin in range(0, n, rows)]

    def _bring_slots(self, address: int, count: int) -> Tensor:
        self._wait()
        ctypes.memmove(self._slots.data_ptr(), address, 8 * count)
        return self._slots[:count].to(self.side.device, non_blocking=True)

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def host_memory(address: int, nbytes: int) -> Tensor:
    """(nbytes,) uint8 over memory that somebody else keeps."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
