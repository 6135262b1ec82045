"""A layer of the matrix form of the cross interaction. Shapes: B samples, D columns, K of a factor.

It is a product whose tiles are finished before they are written.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.gpu.products import grid, inner_of, place, tile, tile_product
from hotbed.ops.gpu.variants import FLOATS, TYPES, Variant, launch, require_gpu

__all__ = ["cross_matrix", "cross_matrix_backward", "variants"]


def cross_matrix(
    x0: Tensor, x: Tensor, factor: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """One layer of the matrix form: x0 * (factor @ weight.T + bias) + x.

    Args:
        x0, x: (B, D) of one dtype, contiguous.
        factor: (B, K) of that dtype; x itself, or x times a narrow matrix.
        weight: (D, K) of that dtype.
        bias: (D,) of that dtype.
        All rows begin at multiples of 16 elements (`hotbed.ops.gpu.products.fits`).

    Returns:
        (B, D), and the factor of x0 that the backward needs, (B, D).

    Raises:
        InputError: the tensors are not on a GPU.
    """
    require_gpu("cross_matrix", x0, x, factor, weight, bias)
    (batch, dim), inner = x.shape, factor.shape[1]
    out, gate = torch.empty_like(x), torch.empty_like(x)
    variant = _matrix_variant(x.dtype, tile(batch, dim))
    launch(
        variant,
        grid(batch, dim, dict(variant.constants)) if inner else (0,),
        x0=x0,
        x=x,
        factor=factor,
        weight=weight,
        bias=bias,
        out=out,
        gate=gate,
        batch=batch,
        dim=dim,
        inner=inner,
        factor_stride=factor.stride(0),
        weight_stride=weight.stride(0),
    )
    return out, gate


def cross_matrix_backward(
    gradient: Tensor, x0: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the product (B, D), of x0 (B, D) and of the bias, (D,) float32.

    Those of factor and weight are plain products, which are torch's to do.

    Raises:
        InputError: the tensors are not on a GPU.
    """
    require_gpu("cross_matrix_backward", gradient, x0, gate)
    batch, dim = x0.shape
    to_gate, to_x0 = torch.empty_like(x0), torch.empty_like(x0)
    variant = _gate_variant(x0.dtype)
    rows, columns = variant.constants["ROWS"], variant.constants["COLUMNS"]
    bands = triton.cdiv(batch, rows)
    partial = torch.empty(bands, dim, dtype=torch.float32, device=x0.device)
    launch(
        variant,
        (bands, triton.cdiv(dim, columns)),
        gradient=gradient,
        x0=x0,
        gate=gate,
        to_gate=to_gate,
        to_x0=to_x0,
        partial=partial,
        batch=batch,
        dim=dim,
    )
    return to_gate, to_x0, partial.sum(0)


def variants() -> list[Variant]:
    """Every variant of the matrix form."""
    products = [_matrix_variant(dtype, name) for dtype in FLOATS for name in ("large", "small")]
    return products + [_gate_variant(dtype) for dtype in FLOATS]


@cache
def _matrix_variant(dtype: torch.dtype, name: str) -> Variant:
    pointers = ("x0", "x", "factor", "weight", "bias", "out", "gate")
    integers = ("batch", "dim", "inner", "factor_stride", "weight_stride")
    return Variant(
        kernel=cross_matrix_kernel,
        types={**dict.fromkeys(pointers, "*" + TYPES[dtype]), **dict.fromkeys(integers, "i64")},
        constants=inner_of(dtype, name),
        aligned=pointers,
        num_warps=8 if name == "large" else 4,
        num_stages=3,
        fused_multiply_add=True,
        since=80,
    )


@cache
def _gate_variant(dtype: torch.dtype) -> Variant:
    own = ("gradient", "x0", "gate", "to_gate", "to_x0")
    return Variant(
        kernel=cross_gate_kernel,
        types={
            **dict.fromkeys(own, "*" + TYPES[dtype]),
            "partial": "*fp32",
            "batch": "i64",
            "dim": "i64",
        },
        constants={"ROWS": 64, "COLUMNS": 64},
        aligned=(*own, "partial"),
    )


# --- Kernels. ---


@triton.jit(do_not_specialize=["batch", "dim", "inner", "factor_stride", "weight_stride"])
def cross_matrix_kernel(
    x0,
    x,
    factor,
    weight,
    bias,
    out,
    gate,
    batch: tl.int64,
    dim: tl.int64,
    inner: tl.int64,
    factor_stride: tl.int64,
    weight_stride: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    dim = dim // 16 * 16
    row, column = place(batch, dim, ROWS, COLUMNS)
    sums = tile_product(
        factor, weight, row, column, batch, dim, inner, factor_stride, weight_stride,
        ROWS, COLUMNS, INNER, True, "tf32",
    )  # fmt: skip
    inside = (row < batch)[:, None] & (column < dim)[None, :]
    places = row[:, None] * dim + column[None, :]
    sums += tl.load(bias + column, mask=column < dim, other=0.0).to(tl.float32)[None, :]
    tl.store(gate + places, sums.to(gate.dtype.element_ty), mask=inside)
    first = tl.load(x0 + places, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, (first * sums + added).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch", "dim"])
def cross_gate_kernel(
    gradient,
    x0,
    gate,
    to_gate,
    to_x0,
    partial,
    batch: tl.int64,
    dim: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    dim = dim // 16 * 16
    band = tl.program_id(0).to(tl.int64)
    row = band * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < batch)[:, None] & (column < dim)[None, :]
    places = row[:, None] * dim + column[None, :]
    gradients = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    by_gate = gradients * tl.load(x0 + places, mask=inside, other=0.0).to(tl.float32)
    by_x0 = gradients * tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(to_gate + places, by_gate.to(to_gate.dtype.element_ty), mask=inside)
    tl.store(to_x0 + places, by_x0.to(to_x0.dtype.element_ty), mask=inside)
    tl.store(partial + band * dim + column, tl.sum(by_gate, 0), mask=column < dim)
