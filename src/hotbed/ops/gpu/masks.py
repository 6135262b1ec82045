"""ReLU and dropout with one bit an element, for products that are there.

Shapes: M rows, N columns.

Bit k of byte i of a row stands for column 8 i + k: whether ReLU and dropout let it through, which
is all that the backward reads of it. Random words are Philox's (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), four for a counter that counts groups of four columns, so they
do not depend on how a matrix is tiled.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.gpu.variants import FLOATS, TYPES, Variant, launch, require_gpu

__all__ = [
    "dropout_numbers",
    "finish",
    "let_through",
    "load_bits",
    "masked",
    "store_bits",
    "variants",
]

_ROWS, _COLUMNS = 16, 128


def finish(product: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
    """dropout(relu(product)) in the place of `product`, and the bits of what got through.

    Args:
        product: (M, N) float32, float16 or bfloat16, contiguous; with the bias.
        seed: (1,) int64 on the device, or None for no dropout.
        dropout: the share of values to set to zero; the others are scaled by 1 / (1 - dropout).

    Returns:
        uint8 (M, ⌈N / 8⌉).

    Raises:
        InputError: the tensors are not on a GPU.
    """
    require_gpu("finish", product)
    rows, columns = product.shape
    bits = torch.empty(rows, -(-columns // 8), dtype=torch.uint8, device=product.device)
    threshold, scale = dropout_numbers(seed, dropout)
    wide = columns % 16 == 0
    launch(
        _finish_variant(product.dtype, seed is not None, wide),
        (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)),
        product=product,
        bits=bits,
        seed=bits if seed is None else seed,
        rows=rows,
        columns=columns,
        threshold=threshold,
        scale=scale,
    )
    return bits


def masked(gradient: Tensor, bits: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """gradient · mask / (1 - dropout), (M, N), and its sum over rows, (N,) float32.

    Raises:
        InputError: the tensors are not on a GPU.
    """
    require_gpu("masked", gradient, bits)
    rows, columns = gradient.shape
    out = torch.empty_like(gradient)
    bands = triton.cdiv(rows, _ROWS)
    partial = torch.empty(bands, columns, dtype=torch.float32, device=gradient.device)
    launch(
        _masked_variant(gradient.dtype, columns % 16 == 0),
        (bands, triton.cdiv(columns, _COLUMNS)),
        gradient=gradient,
        bits=bits,
        out=out,
        partial=partial,
        rows=rows,
        columns=columns,
        scale=1 / (1 - dropout),
    )
    return out, partial.sum(0)


def variants() -> list[Variant]:
    """Every variant of the masks."""
    both = (True, False)
    return [
        *(_finish_variant(d, drop, wide) for d in FLOATS for drop in both for wide in both),
        *(_masked_variant(d, wide) for d in FLOATS for wide in both),
    ]


def dropout_numbers(seed: Tensor | None, dropout: float) -> tuple[int, float]:
    """Random words below the first number are dropped; the others' values are scaled."""
    return (0, 1.0) if seed is None else (round(dropout * 2**32), 1 / (1 - dropout))


@cache
def _finish_variant(dtype: torch.dtype, drop: bool, wide: bool) -> Variant:
    return Variant(
        kernel=finish_kernel,
        types={
            "product": "*" + TYPES[dtype],
            "bits": "*u8",
            "seed": "*i64" if drop else "*u8",
            **dict.fromkeys(("rows", "columns", "threshold"), "i64"),
            "scale": "fp32",
        },
        constants={"ROWS": _ROWS, "COLUMNS": _COLUMNS, "DROP": drop, "WIDE": wide},
        aligned=("product", "bits"),
    )


@cache
def _masked_variant(dtype: torch.dtype, wide: bool) -> Variant:
    return Variant(
        kernel=masked_kernel,
        types={
            **dict.fromkeys(("gradient", "out"), "*" + TYPES[dtype]),
            "bits": "*u8",
            "partial": "*fp32",
            **dict.fromkeys(("rows", "columns"), "i64"),
            "scale": "fp32",
        },
        constants={"ROWS": _ROWS, "COLUMNS": _COLUMNS, "WIDE": wide},
        aligned=("gradient", "bits", "out", "partial"),
    )


# --- Kernels. ---


@triton.jit
def let_through(values, seed, row, column, columns, threshold,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Mask of what ReLU and dropout let through of a tile, whose columns begin at a multiple of 8."""
    kept = values > 0
    if DROP:
        group = tl.min(column, 0) // 4 + tl.arange(0, COLUMNS // 4)
        counter = row[:, None] * ((columns + 3) // 4) + group[None, :]
        a, b, c, d = tl.randint4x(tl.load(seed), counter)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, COLUMNS])
        kept &= words.to(tl.uint32, bitcast=True).to(tl.int64) >= threshold
    return kept


@triton.jit
def store_bits(bits, kept, row, column, rows, columns,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    weights = 1 << tl.arange(0, 8)
    grouped = tl.reshape(kept.to(tl.int32), [ROWS, COLUMNS // 8, 8])
    packed = tl.sum(grouped * weights[None, None, :], 2).to(tl.uint8)
    width = (columns + 7) // 8
    at = tl.min(column, 0) // 8 + tl.arange(0, COLUMNS // 8)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    tl.store(bits + row[:, None] * width + at[None, :], packed, mask=inside)


@triton.jit
def load_bits(bits, row, column, rows, columns,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """(ROWS, COLUMNS) of 0 and 1."""
    width = (columns + 7) // 8
    at = tl.min(column, 0) // 8 + tl.arange(0, COLUMNS // 8)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    packed = tl.load(bits + row[:, None] * width + at[None, :], mask=inside, other=0).to(tl.int32)
    grouped = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(grouped, [ROWS, COLUMNS])


@triton.jit(do_not_specialize=["rows", "columns", "threshold", "scale"])
def finish_kernel(
    product,
    bits,
    seed,
    rows: tl.int64,
    columns: tl.int64,
    threshold: tl.int64,
    scale: tl.float32,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROP: tl.constexpr,
    WIDE: tl.constexpr,
):
    if WIDE:
        columns = columns // 16 * 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None] * columns + column[None, :]
    values = tl.load(product + places, mask=inside, other=0.0).to(tl.float32)
    kept = let_through(values, seed, row, column, columns, threshold, ROWS, COLUMNS, DROP)
    store_bits(bits, kept, row, column, rows, columns, ROWS, COLUMNS)
    result = tl.where(kept, values * scale, 0.0).to(product.dtype.element_ty)
    tl.store(product + places, result, mask=inside)


@triton.jit(do_not_specialize=["rows", "columns", "scale"])
def masked_kernel(
    gradient,
    bits,
    out,
    partial,
    rows: tl.int64,
    columns: tl.int64,
    scale: tl.float32,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    if WIDE:
        columns = columns // 16 * 16
    band = tl.program_id(0).to(tl.int64)
    row = band * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None] * columns + column[None, :]
    values = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    kept = load_bits(bits, row, column, rows, columns, ROWS, COLUMNS)
    values = tl.where(kept != 0, values * scale, 0.0)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=inside)
    tl.store(partial + band * columns + column, tl.sum(values, 0), mask=column < columns)
