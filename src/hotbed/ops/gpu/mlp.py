"""Linear layers with ReLU and dropout, finished while a tile of the product is at hand.

Shapes: M rows, K columns of a layer's input, N of its output.

Of what ReLU and dropout let through, one bit an element is kept (`hotbed.ops.gpu.masks`), which is
all that the backward reads of it. The scale of dropout is part of the product that makes the
gradient before it.

A layer's weight gradient, and the gradient of the first layer's input, are plain products, which
are cuBLAS's to do; so are products in exact float32 and of rows that cannot be loaded 16 bytes at a
time, after which `hotbed.ops.gpu.masks` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.gpu.masks import dropout_numbers, let_through, load_bits, store_bits
from hotbed.ops.gpu.products import grid, inner_of, place, tile, tile_product
from hotbed.ops.gpu.variants import FLOATS, TYPES, Variant, choose, launch, require_gpu

__all__ = ["linear", "masked_product", "variants"]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """dropout(relu(x @ weight.T + bias)), and the bits of what got through.

    Args:
        x: (M, K) float32 (by TF32), float16 or bfloat16.
        weight: (N, K); bias: (N,), of the same dtype. `hotbed.ops.gpu.products.fits` them.
        seed: (1,) int64 on the device, or None for no dropout.
        dropout: the share of values to set to zero; the others are scaled by 1 / (1 - dropout).

    Returns:
        (M, N) of the dtype of `x`, and uint8 (M, ⌈N / 8⌉).

    Raises:
        InputError: the tensors are not on a GPU.
    """
    require_gpu("linear", x, weight, bias)
    (rows, inner), columns = x.shape, len(weight)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    bits = torch.empty(rows, -(-columns // 8), dtype=torch.uint8, device=x.device)
    threshold, scale = dropout_numbers(seed, dropout)

    def run(variant: Variant) -> None:
        launch(
            variant,
            grid(rows, columns, dict(variant.constants)),
            x=x,
            weight=weight,
            bias=bias,
            out=out,
            bits=bits,
            seed=bits if seed is None else seed,
            rows=rows,
            columns=columns,
            inner=inner,
            x_stride=x.stride(0),
            weight_stride=weight.stride(0),
            threshold=threshold,
            scale=scale,
        )

    run(_chosen(linear_kernel, x.dtype, rows, columns, inner, run, drop=seed is not None))
    return out, bits


def masked_product(
    gradient: Tensor, weight: Tensor, bits: Tensor, dropout: float
) -> tuple[Tensor, Tensor]:
    """(gradient @ weight) · mask / (1 - dropout): through a layer and what came before it.

    Args:
        gradient: (M, N) of a layer's product.
        weight: (N, K) of that layer.
        bits: (M, ⌈K / 8⌉) of the layer before, whose output was this one's input.
        dropout: of that layer.

    Returns:
        The gradient of that layer's product, (M, K), and of its bias, (K,) float32.

    Raises:
        InputError: the tensors are not on a GPU.
    """
    require_gpu("masked_product", gradient, weight, bits)
    (rows, inner), columns = gradient.shape, weight.shape[1]
    if gradient.dtype == torch.float32:
        # Hopper's tensor cores take TF32 by rows only, and a weight is small beside a batch.
        weight = weight.t().contiguous()
    out = torch.empty(rows, columns, dtype=gradient.dtype, device=gradient.device)
    # Of every band of the smallest tiles; larger tiles leave the others at zero.
    bands = -(-rows // 64)
    partial = torch.zeros(bands, columns, dtype=torch.float32, device=gradient.device)

    def run(variant: Variant) -> None:
        launch(
            variant,
            grid(rows, columns, dict(variant.constants)),
            gradient=gradient,
            weight=weight,
            bits=bits,
            out=out,
            partial=partial,
            rows=rows,
            columns=columns,
            inner=inner,
            gradient_stride=gradient.stride(0),
            weight_stride=weight.stride(0),
            scale=1 / (1 - dropout),
        )

    run(_chosen(masked_product_kernel, gradient.dtype, rows, columns, inner, run))
    return out, partial.sum(0)


def variants() -> list[Variant]:
    """Every variant of the layers."""
    both = (True, False)
    tiles = ("large", "small")
    return [
        *(_linear_variant(d, name, drop) for d in FLOATS for name in tiles for drop in both),
        *(_product_variant(d, name) for d in FLOATS for name in tiles),
    ]


def _chosen(
    kernel: Any,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    inner: int,
    run: Callable[[Variant], None],
    **flags: bool,
) -> Variant:
    make = _linear_variant if kernel is linear_kernel else _product_variant
    first = tile(rows, columns)
    names = (first, "small" if first == "large" else "large")
    shape = f"{TYPES[dtype]}, 2^{rows.bit_length()} x {columns} x {inner}"
    return choose([make(dtype, name, *flags.values()) for name in names], shape, run)


@cache
def _linear_variant(dtype: torch.dtype, name: str, drop: bool) -> Variant:
    own = ("x", "weight", "bias", "out")
    integers = ("rows", "columns", "inner", "x_stride", "weight_stride", "threshold")
    return Variant(
        kernel=linear_kernel,
        types={
            **dict.fromkeys(own, "*" + TYPES[dtype]),
            **dict.fromkeys(integers, "i64"),
            "bits": "*u8",
            "seed": "*i64" if drop else "*u8",
            "scale": "fp32",
        },
        constants={**inner_of(dtype, name), "DROP": drop},
        aligned=(*own, "bits"),
        num_warps=_WARPS[name],
        num_stages=3,
        fused_multiply_add=True,
        since=80,
    )


@cache
def _product_variant(dtype: torch.dtype, name: str) -> Variant:
    own = ("gradient", "weight", "out")
    integers = ("rows", "columns", "inner", "gradient_stride", "weight_stride")
    return Variant(
        kernel=masked_product_kernel,
        types={
            **dict.fromkeys(own, "*" + TYPES[dtype]),
            **dict.fromkeys(integers, "i64"),
            "bits": "*u8",
            "partial": "*fp32",
            "scale": "fp32",
        },
        constants={**inner_of(dtype, name), "TRANSPOSED": dtype == torch.float32},
        aligned=(*own, "bits", "partial"),
        num_warps=_WARPS[name],
        num_stages=3,
        fused_multiply_add=True,
        since=80,
    )


_WARPS = {"large": 8, "small": 4}


# --- Kernels. ---


@triton.jit(
    do_not_specialize=[
        "rows", "columns", "inner", "x_stride", "weight_stride", "threshold", "scale",
    ]
)  # fmt: skip
def linear_kernel(
    x,
    weight,
    bias,
    out,
    bits,
    seed,
    rows: tl.int64,
    columns: tl.int64,
    inner: tl.int64,
    x_stride: tl.int64,
    weight_stride: tl.int64,
    threshold: tl.int64,
    scale: tl.float32,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    DROP: tl.constexpr,
):
    columns = columns // 16 * 16
    row, column = place(rows, columns, ROWS, COLUMNS)
    sums = tile_product(
        x, weight, row, column, rows, columns, inner, x_stride, weight_stride,
        ROWS, COLUMNS, INNER, True, "tf32",
    )  # fmt: skip
    sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    kept = let_through(sums, seed, row, column, columns, threshold, ROWS, COLUMNS, DROP)
    store_bits(bits, kept, row, column, rows, columns, ROWS, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    result = tl.where(kept, sums * scale, 0.0).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * columns + column[None, :], result, mask=inside)


@triton.jit(
    do_not_specialize=["rows", "columns", "inner", "gradient_stride", "weight_stride", "scale"]
)
def masked_product_kernel(
    gradient,
    weight,
    bits,
    out,
    partial,
    rows: tl.int64,
    columns: tl.int64,
    inner: tl.int64,
    gradient_stride: tl.int64,
    weight_stride: tl.int64,
    scale: tl.float32,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    columns = columns // 16 * 16
    row, column = place(rows, columns, ROWS, COLUMNS)
    sums = tile_product(
        gradient, weight, row, column, rows, columns, inner, gradient_stride, weight_stride,
        ROWS, COLUMNS, INNER, TRANSPOSED, "tf32",
    )  # fmt: skip
    kept = load_bits(bits, row, column, rows, columns, ROWS, COLUMNS)
    sums = tl.where(kept != 0, sums * scale, 0.0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    result = sums.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * columns + column[None, :], result, mask=inside)
    band = tl.min(row, 0) // ROWS
    tl.store(partial + band * columns + column, tl.sum(sums, 0), mask=column < columns)
