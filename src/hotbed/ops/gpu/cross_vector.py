"""The vector form of the cross interaction. Shapes: B samples, D columns, L layers.

It needs no pass a layer: with x_l = α_l x_0 + β_l, where α is a number a sample and β a vector for
all, x_0·w_l gives α_(l+1) = α_l (1 + x_0·w_l) + β_l·w_l. So all layers together read x_0 once (and
again from the cache) and write the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.gpu.variants import FLOATS, MOST_LAYERS, TYPES, Variant, launch, require_gpu

__all__ = ["cross_vector", "cross_vector_backward", "variants"]


def cross_vector(x: Tensor, weight: Tensor, shift: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """All layers of the vector form: α_L x + bias.

    Args:
        x: (B, D) float32, float16 or bfloat16, contiguous.
        weight: (L, D) float32, L at most MOST_LAYERS.
        shift: (L,) float32: β_l·w_l.
        bias: (D,) float32: β_L.

    Returns:
        (B, D) of the dtype of `x`, and the products x·w_l, (B, L) float32.

    Raises:
        InputError: the tensors are not on a GPU.
    """
    require_gpu("cross_vector", x, weight, shift, bias)
    batch, dim = x.shape
    out = torch.empty_like(x)
    products = torch.empty(batch, len(weight), dtype=torch.float32, device=x.device)
    variant = _vector_variant(cross_vector_kernel, x.dtype, dim % 16 == 0)
    launch(
        variant,
        (triton.cdiv(batch, variant.constants["ROWS"]),),
        x=x,
        weight=weight,
        shift=shift,
        bias=bias,
        out=out,
        products=products,
        batch=batch,
        dim=dim,
        layers=len(weight),
    )
    return out, products


def cross_vector_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, shift: Tensor, products: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x` (B, D), of every sample's products (B, L) and of its shifts (B, L).

    The gradient of `weight` is that of the products times x, that of `bias` the sum of `gradient`.

    Raises:
        InputError: the tensors are not on a GPU.
    """
    require_gpu("cross_vector_backward", gradient, x, weight, shift, products)
    batch, dim = x.shape
    to_x = torch.empty_like(x)
    to_products, to_shifts = torch.empty_like(products), torch.empty_like(products)
    variant = _vector_variant(cross_vector_backward_kernel, x.dtype, dim % 16 == 0)
    launch(
        variant,
        (triton.cdiv(batch, variant.constants["ROWS"]),),
        gradient=gradient,
        x=x,
        weight=weight,
        shift=shift,
        products=products,
        to_x=to_x,
        to_products=to_products,
        to_shifts=to_shifts,
        batch=batch,
        dim=dim,
        layers=len(weight),
    )
    return to_x, to_products, to_shifts


def variants() -> list[Variant]:
    """Every variant of the vector form."""
    return [
        _vector_variant(kernel, dtype, wide)
        for kernel in (cross_vector_kernel, cross_vector_backward_kernel)
        for dtype in FLOATS
        for wide in (True, False)
    ]


@cache
def _vector_variant(kernel: Any, dtype: torch.dtype, wide: bool) -> Variant:
    backward = kernel is cross_vector_backward_kernel
    own = ("gradient", "x", "to_x") if backward else ("x", "out")
    last = ("to_products", "to_shifts") if backward else ("bias",)
    full = ("weight", "shift", "products", *last)
    return Variant(
        kernel=kernel,
        types={
            **dict.fromkeys(own, "*" + TYPES[dtype]),
            **dict.fromkeys(full, "*fp32"),
            **dict.fromkeys(("batch", "dim", "layers"), "i64"),
        },
        constants={
            "ROWS": 4,
            "LAYERS": MOST_LAYERS,
            "COLUMNS": 512 // dtype.itemsize,
            "WIDE": wide,
        },
        aligned=(*own, *full),
        fused_multiply_add=True,
    )


# --- Kernels. ---


@triton.jit
def grown(products, shift, last, ROWS: tl.constexpr, LAYERS: tl.constexpr):
    """α after `last` layers, (ROWS,)."""
    layer = tl.arange(0, LAYERS)
    alpha = tl.full([ROWS], 1.0, tl.float32)
    for now in range(0, last):
        chosen = (layer == now)[None, :]
        p = tl.sum(tl.where(chosen, products, 0.0), 1)
        alpha = alpha * (1.0 + p) + tl.load(shift + now)
    return alpha


@triton.jit(do_not_specialize=["batch", "dim", "layers"])
def cross_vector_kernel(
    x,
    weight,
    shift,
    bias,
    out,
    products,
    batch: tl.int64,
    dim: tl.int64,
    layers: tl.int64,
    ROWS: tl.constexpr,
    LAYERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    if WIDE:
        dim = dim // 16 * 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    layer = tl.arange(0, LAYERS)
    column = tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, LAYERS], tl.float32)
    for begin in range(0, dim, COLUMNS):
        at = begin + column
        inside = (row < batch)[:, None] & (at < dim)[None, :]
        values = tl.load(x + row[:, None] * dim + at[None, :], mask=inside, other=0.0)
        inside = (layer < layers)[:, None] & (at < dim)[None, :]
        weights = tl.load(weight + layer[:, None] * dim + at[None, :], mask=inside, other=0.0)
        sums += tl.sum(values.to(tl.float32)[:, None, :] * weights[None, :, :], 2)
    kept = (row < batch)[:, None] & (layer < layers)[None, :]
    tl.store(products + row[:, None] * layers + layer[None, :], sums, mask=kept)
    alpha = grown(sums, shift, layers, ROWS, LAYERS)
    for begin in range(0, dim, COLUMNS):
        at = begin + column
        inside = (row < batch)[:, None] & (at < dim)[None, :]
        places = row[:, None] * dim + at[None, :]
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        added = tl.load(bias + at, mask=at < dim, other=0.0)
        result = values * alpha[:, None] + added[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch", "dim", "layers"])
def cross_vector_backward_kernel(
    gradient,
    x,
    weight,
    shift,
    products,
    to_x,
    to_products,
    to_shifts,
    batch: tl.int64,
    dim: tl.int64,
    layers: tl.int64,
    ROWS: tl.constexpr,
    LAYERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    if WIDE:
        dim = dim // 16 * 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    layer = tl.arange(0, LAYERS)
    column = tl.arange(0, COLUMNS)
    to_alpha = tl.zeros([ROWS], tl.float32)
    for begin in range(0, dim, COLUMNS):
        at = begin + column
        inside = (row < batch)[:, None] & (at < dim)[None, :]
        places = row[:, None] * dim + at[None, :]
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        gradients = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        to_alpha += tl.sum(values * gradients, 1)
    kept = (row < batch)[:, None] & (layer < layers)[None, :]
    numbers = row[:, None] * layers + layer[None, :]
    p = tl.load(products + numbers, mask=kept, other=0.0)
    last = grown(p, shift, layers, ROWS, LAYERS)
    by_product = tl.zeros([ROWS, LAYERS], tl.float32)
    by_shift = tl.zeros([ROWS, LAYERS], tl.float32)
    for back in range(0, layers):
        now = layers - 1 - back
        chosen = (layer == now)[None, :]
        alpha = grown(p, shift, now, ROWS, LAYERS)
        by_product = tl.where(chosen, (to_alpha * alpha)[:, None], by_product)
        by_shift = tl.where(chosen, to_alpha[:, None], by_shift)
        to_alpha = to_alpha * (1.0 + tl.sum(tl.where(chosen, p, 0.0), 1))
    tl.store(to_products + numbers, by_product, mask=kept)
    tl.store(to_shifts + numbers, by_shift, mask=kept)
    for begin in range(0, dim, COLUMNS):
        at = begin + column
        inside = (layer < layers)[:, None] & (at < dim)[None, :]
        weights = tl.load(weight + layer[:, None] * dim + at[None, :], mask=inside, other=0.0)
        result = tl.sum(by_product[:, :, None] * weights[None, :, :], 1)
        inside = (row < batch)[:, None] & (at < dim)[None, :]
        places = row[:, None] * dim + at[None, :]
        gradients = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        result += gradients * last[:, None]
        tl.store(to_x + places, result.to(to_x.dtype.element_ty), mask=inside)
