"""Parts that the sparse kernels share: how rows are addressed, read, written and rounded.

One launch serves many tables or features. Their addresses and numbers travel in one int64 array,
a line each ("lines" below), which a program reads at its start. Rows are cut into vectors of
VECTOR values that one thread moves at once. The vectors of all rows of a line are numbered through,
so that a block has work for all its threads whatever the dim.

Addresses hide tensors from torch: whoever launches on several streams keeps them alive himself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.codec import half_bits, half_values
from hotbed.ops.gpu.recording import upload_into

__all__ = [
    "KINDS",
    "Launch",
    "NO_SLOT",
    "WIDEST",
    "address_of",
    "double_bits",
    "line_split",
    "programs",
    "upload",
    "vector_length",
    "width_class",
]

KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
"""The core's numbers of row dtypes."""

NO_SLOT = -(2**63)
"""The slot of a position that is padding."""

WIDEST = 32768
"""The largest dim: vectors within a block are divided by multiplication, exact up to here."""

_BLOCKS_PER_PROCESSOR = 16


@dataclass
class Launch:
    """Lines that share a launch, and the most work of any."""

    lines: list[list[int]] = field(default_factory=list)
    blocks: int = 0

    def add(self, line: list[int], blocks: int) -> None:
        """Another line, which has so many blocks at most."""
        self.lines.append(line)
        self.blocks = max(self.blocks, blocks)

    @property
    def most(self) -> tuple[int, int]:
        """The grid in which every block is a program."""
        return self.blocks, len(self.lines)


def upload(lines: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 (lines, fields) on the device, not to be written to. The host does not wait for the copy.

    The same lines again, as steps over buffers that stay have them, are not copied again.
    """
    recorded = upload_into(lines)
    if recorded is not None:
        return recorded
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _uploaded(tuple(map(tuple, lines)), device, stream)


@lru_cache(maxsize=256)
def _uploaded(lines: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    if device.type != "cuda":
        return torch.tensor(lines, dtype=torch.int64, device=device)
    host = torch.tensor(lines, dtype=torch.int64, device="cpu", pin_memory=True)
    return host.to(device, non_blocking=True)


def address_of(tensor: Tensor | None) -> int:
    """Where its first element lies; 0 for none, and for a tensor without elements."""
    return 0 if tensor is None else tensor.data_ptr()


def double_bits(value: float) -> int:
    """The bits of a double as int64, to travel in a line."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def width_class(itemsize: int, vector: int) -> int:
    """The WIDTH that a variant is made for. Single values are of either width, in one variant."""
    return 0 if vector == 1 else itemsize


def vector_length(dim: int, tensors: Sequence[Tensor | None], widest: int = 4) -> int:
    """How many values of a row a thread moves at once: `widest`, or less where rows do not allow it.

    Every row of every tensor (rows, dim), whose last stride is 1, must begin at a multiple of the
    vector's bytes, 16 at most.
    """
    for length in (widest, 4):
        if dim % length == 0 and all(
            t is None or t.numel() == 0 or _divides(t, length * t.itemsize) for t in tensors
        ):
            return length
    return 1


def _divides(tensor: Tensor, nbytes: int) -> bool:
    nbytes = min(nbytes, 16)
    stride = tensor.stride(0) * tensor.itemsize if tensor.dim() > 1 else 0
    return tensor.data_ptr() % nbytes == 0 and stride % nbytes == 0


def line_split(what: str, dim: int, vector: int) -> tuple[int, int]:
    """(vectors a row, the multiplier that `spread` divides by them with).

    Raises:
        InputError: rows are wider than WIDEST.
    """
    if dim > WIDEST:
        raise InputError(f"{what}: dim {dim} is above {WIDEST}. Split the table by columns.")
    vectors = dim // vector
    return vectors, -(-(2**32) // vectors) if vectors > 1 else 0


def programs(blocks: int, device: torch.device) -> int:
    """How many programs share `blocks` blocks of a line whose true number the device alone knows."""
    if device.type != "cuda":
        return min(blocks, 2)  # interpreted one after the other: enough to test that they share
    return min(blocks, _processors(device) * _BLOCKS_PER_PROCESSOR)


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# --- For kernels. ---


@triton.jit
def spread(block, vectors, multiplier, BLOCK: tl.constexpr):
    """(row, vector within the row), int64 (BLOCK,), of the vectors of a block, which is int64."""
    first = block * BLOCK
    row = first // vectors
    at = (first - row * vectors).to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
    # at // vectors: exact while at * vectors < 2^32.
    shared = tl.zeros([BLOCK], tl.uint32) + multiplier.to(tl.uint32)
    further = tl.where(vectors == 1, at, tl.umulhi(at, shared))
    column = at - further * vectors.to(tl.uint32)
    return row + further.to(tl.int64), column.to(tl.int64)


@triton.jit
def pointers(address, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """Byte addresses (BLOCK,) → pointers (BLOCK, VECTOR) to float32, or to the bits of 16-bit values.

    Addresses are multiples of what a vector takes, 16 bytes at most, so that access is as wide.
    """
    if WIDTH == 4:
        first = address.to(tl.pointer_type(tl.float32))[:, None]
    else:
        first = address.to(tl.pointer_type(tl.int16))[:, None]
    if VECTOR * WIDTH >= 16:
        first = tl.multiple_of(first, (16, 16))
    elif VECTOR * WIDTH == 8:
        first = tl.multiple_of(first, (8, 8))
    return first + tl.arange(0, VECTOR)[None, :]


@triton.jit
def half_of(bits, kind):
    """float16 (kind 2) or bfloat16 (kind 3) bits as int16 → float32."""
    # The bits of one dtype may be a signaling NaN of the other.
    return tl.where(
        kind == 3, half_values(bits, True), half_values(tl.where(kind == 2, bits, 0), False)
    )


@triton.jit
def only_if(flag, mask):
    """mask (BLOCK,) where the scalar `flag` holds. (The interpreter cannot join the two by &.)"""
    return tl.where(flag, mask, mask != mask)


@triton.jit
def width_of(kind, WIDTH: tl.constexpr):
    """Bytes of a value of `kind`: WIDTH, or if that is 0, what the device alone knows."""
    if WIDTH == 0:
        return tl.where(kind == 0, 4, 2)
    else:
        return WIDTH


@triton.jit
def load_values(address, kind, live, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """float32 (BLOCK, VECTOR) from values of WIDTH bytes (0: either); zeros where not `live`."""
    if WIDTH == 4:
        return tl.load(pointers(address, 4, VECTOR), mask=live[:, None], other=0.0)
    elif WIDTH == 2:
        return half_of(tl.load(pointers(address, 2, VECTOR), mask=live[:, None], other=0), kind)
    else:
        wide, narrow = only_if(kind == 0, live), only_if(kind != 0, live)
        full = tl.load(pointers(address, 4, VECTOR), mask=wide[:, None], other=0.0)
        bits = tl.load(pointers(address, 2, VECTOR), mask=narrow[:, None], other=0)
        return tl.where(kind == 0, full, half_of(bits, kind))


@triton.jit
def read_values(rows, column, kind, mask, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """float32 (ROWS, COLUMNS) at columns (COLUMNS,) of rows that begin at byte addresses (ROWS,)."""
    if WIDTH == 0:
        full = read_values(rows, column, kind, only_if(kind == 0, mask), 4, VECTOR)
        half = read_values(rows, column, kind, only_if(kind != 0, mask), 2, VECTOR)
        return tl.where(kind == 0, full, half)
    elif WIDTH == 4:
        first = rows.to(tl.pointer_type(tl.float32))[:, None]
        if VECTOR == 4:
            first = tl.multiple_of(first, (16, 16))
        return tl.load(first + column[None, :], mask=mask, other=0.0)
    else:
        first = rows.to(tl.pointer_type(tl.int16))[:, None]
        if VECTOR == 4:
            first = tl.multiple_of(first, (8, 8))
        return half_of(tl.load(first + column[None, :], mask=mask, other=0), kind)


@triton.jit
def store_values(address, values, kind, live, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """Writes float32 (BLOCK, VECTOR) as values of WIDTH bytes (0: either), to nearest even."""
    if WIDTH != 2:
        wide = live if WIDTH == 4 else only_if(kind == 0, live)
        tl.store(pointers(address, 4, VECTOR), values, mask=wide[:, None])
    if WIDTH != 4:
        other = tl.where(kind == 2, values, 0.0)
        bits = tl.where(kind == 3, half_bits(values, True), half_bits(other, False))
        store_bits(address, bits, kind, live, VECTOR)


@triton.jit
def store_bits(address, bits, kind, live, VECTOR: tl.constexpr):
    """Writes the bits of 16-bit values (BLOCK, VECTOR), if `kind` has as many."""
    narrow = only_if(kind != 0, live)
    tl.store(pointers(address, 2, VECTOR), bits, mask=narrow[:, None])


@triton.jit
def at64(address):
    """A byte address as a pointer to int64."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def at32(address):
    """A byte address as a pointer to float32."""
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def last_not_above(array, stride, count, wanted, steps):
    """The last i in [0, count) with array[i * stride] <= wanted, of rising values; 0 if there is none.

    `array` and `count` may be the same for all of `wanted` or not; steps >= log2(count), rounded up.
    """
    low = wanted * 0
    high = low + count
    for _ in range(0, steps):
        middle = (low + high) // 2
        right = middle > low
        right = right & (tl.load(array + middle * stride, mask=right, other=0) <= wanted)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, tl.maximum(middle, low + 1))
    return low
