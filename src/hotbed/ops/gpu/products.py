"""Products of tiles, for kernels that use tensor cores: inputs by a linear layer's weights.

Shapes: M rows, N columns of the result, K columns of the input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.gpu.variants import interpreted, tensor_cores

__all__ = [
    "INTERPRETED",
    "TILES",
    "fits",
    "grid",
    "inner_of",
    "place",
    "product",
    "tensor_cores",
    "tile",
    "tile_product",
]

INTERPRETED = tl.constexpr(interpreted())

TILES: dict[str, dict[str, int]] = {
    "large": {"ROWS": 128, "COLUMNS": 128, "INNER": 64},
    "small": {"ROWS": 64, "COLUMNS": 64, "INNER": 64},
}
"""Tiles of a result, and how much of the inner dimension is worked on at a time, in 16 bits."""

_FULL = 132
"""Large tiles that are enough work for a card: one a multiprocessor of the largest."""


def tile(rows: int, columns: int) -> str:
    """The name of the tile for a result of `rows` x `columns`."""
    large = TILES["large"]
    tiles = -(-rows // large["ROWS"]) * -(-columns // large["COLUMNS"])
    return "large" if tiles >= _FULL and columns >= large["COLUMNS"] else "small"


def grid(rows: int, columns: int, constants: dict[str, int]) -> tuple[int, ...]:
    """One program a tile."""
    return (-(-rows // constants["ROWS"]) * -(-columns // constants["COLUMNS"]),)


def fits(*matrices: Tensor) -> bool:
    """Whether the kernels here are meant for these factors; torch's products are otherwise.

    They are where tensor cores may be used, and where rows begin at multiples of 16 elements:
    in exact float32 cuBLAS is faster, and unaligned rows cannot be loaded 16 bytes at a time.
    """
    return all(
        matrix.dim() == 2
        and matrix.stride(1) == 1
        and matrix.stride(0) % 16 == 0
        and matrix.shape[1] % 16 == 0
        and matrix.data_ptr() % 16 == 0
        and tensor_cores(matrix)
        for matrix in matrices
    )


@triton.jit
def product(left, right, sums, PRECISION: tl.constexpr):
    """sums + left @ right, summed in float32."""
    if INTERPRETED:  # where bfloat16 is its bits, and its products are theirs
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision=PRECISION)


@triton.jit
def place(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows and columns of this program's tile; neighbours share rows of either factor."""
    band: tl.constexpr = 8
    program = tl.program_id(0)
    down = tl.cdiv(rows, ROWS).to(tl.int32)
    across = tl.cdiv(columns, COLUMNS).to(tl.int32)
    first = program // (band * across) * band
    height = tl.minimum(down - first, band)
    within = program % (band * across)
    row = (first + within % height).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (within // height).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column


@triton.jit
def tile_product(
    left,
    right,
    row,
    column,
    rows,
    columns,
    inner,
    left_stride,
    right_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of left (M, K) @ right (K, N), or of left @ right.T (TRANSPOSED), in float32.

    Strides, K, and N unless TRANSPOSED, are multiples of 16.
    """
    left_stride = left_stride // 16 * 16
    right_stride = right_stride // 16 * 16
    inner = inner // 16 * 16
    if not TRANSPOSED:
        columns = columns // 16 * 16
    k = tl.arange(0, INNER)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, inner, INNER):
        at = (begin + k).to(tl.int64)
        a = tl.load(
            left + row[:, None] * left_stride + at[None, :],
            mask=(row < rows)[:, None] & (at < inner)[None, :],
            other=0.0,
        )
        if TRANSPOSED:
            places = right + column[None, :] * right_stride + at[:, None]
        else:
            places = right + at[:, None] * right_stride + column[None, :]
        b = tl.load(places, mask=(at < inner)[:, None] & (column < columns)[None, :], other=0.0)
        sums = product(a, b, sums, PRECISION)
    return sums


def inner_of(dtype: torch.dtype, name: str) -> dict[str, int]:
    """The constants of a tile: bytes of the inner dimension are the same for every dtype."""
    constants = dict(TILES[name])
    constants["INNER"] = constants["INNER"] * 2 // dtype.itemsize
    return constants
