"""The dot interaction, forward and backward: a sample's pair products never leave its program.

Shapes: B samples, F vectors beside the dense one, N = F + 1 vectors in all, d columns, P pairs.
Per sample, N vectors are read once, and d + P values written; the N x N products stay in
registers. The backward reads the vectors and the d + P gradients, and writes N vectors.
Not for cards before sm_80, whose tensor cores Triton does not use.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.products import product
from hotbed.ops.gpu.variants import (
    FLOATS,
    MOST_VECTORS,
    TYPES,
    Variant,
    launch,
    require_gpu,
    tensor_cores,
)

__all__ = ["interact", "interact_backward", "variants"]

_PADDED = (16, 32, MOST_VECTORS)


def interact(dense: Tensor, vectors: Tensor, self_interaction: bool) -> Tensor:
    """``[x_0, x_1·x_0, x_2·x_0, x_2·x_1, …]`` of each sample; see `hotbed.nn.DotInteraction`.

    Products of float32 use TF32 where ``torch.set_float32_matmul_precision`` allows it and the
    card has it; those of float16 and bfloat16 are summed in float32.

    Args:
        dense: (B, d) float32, float16 or bfloat16: x_0.
        vectors: (B, F, d) of the same dtype: x_1 … x_F; F < MOST_VECTORS.
        self_interaction: whether the products of a vector with itself belong to the output.

    Returns:
        (B, d + P), contiguous.

    Raises:
        InputError: shapes or dtypes do not fit, or the tensors are not on a GPU.
    """
    _check("interact", dense, vectors)
    dense, vectors = _rows(dense), _rows(vectors)
    batch, count, dim = vectors.shape
    width = dim + (count + 1) * (count + 2 * self_interaction) // 2
    out = torch.empty(batch, width, dtype=dense.dtype, device=dense.device)
    wide = _is_wide(dim, dense, vectors)
    launch(
        _variant(interact_kernel, dense.dtype, count + 1, tensor_cores(dense), wide),
        (batch,),
        dense=dense,
        vectors=vectors,
        out=out,
        dense_stride=dense.stride(0),
        vectors_stride=vectors.stride(0),
        vector_stride=vectors.stride(1),
        out_stride=width,
        count=count + 1,
        dim=dim,
        self_interaction=int(self_interaction),
    )
    return out


def interact_backward(
    gradient: Tensor, dense: Tensor, vectors: Tensor, self_interaction: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `dense` (B, d) and `vectors` (B, F, d) for that of the output (B, d + P).

    Raises:
        InputError: shapes or dtypes do not fit, or the tensors are not on a GPU.
    """
    _check("interact_backward", dense, vectors)
    dense, vectors, gradient = _rows(dense), _rows(vectors), _rows(gradient.to(dense.dtype))
    require_gpu("interact_backward", gradient, dense)
    batch, count, dim = vectors.shape
    width = dim + (count + 1) * (count + 2 * self_interaction) // 2
    if gradient.shape != (batch, width):
        raise InputError(
            f"interact_backward: the gradient has shape {tuple(gradient.shape)}. "
            f"Pass ({batch}, {width})."
        )
    to_dense = torch.empty(batch, dim, dtype=dense.dtype, device=dense.device)
    to_vectors = torch.empty(batch, count, dim, dtype=dense.dtype, device=dense.device)
    wide = _is_wide(dim, dense, vectors)
    launch(
        _variant(interact_backward_kernel, dense.dtype, count + 1, tensor_cores(dense), wide),
        (batch,),
        gradient=gradient,
        dense=dense,
        vectors=vectors,
        to_dense=to_dense,
        to_vectors=to_vectors,
        gradient_stride=gradient.stride(0),
        dense_stride=dense.stride(0),
        vectors_stride=vectors.stride(0),
        vector_stride=vectors.stride(1),
        count=count + 1,
        dim=dim,
        self_interaction=int(self_interaction),
    )
    return to_dense, to_vectors


def variants() -> list[Variant]:
    """Every variant of the interaction."""
    shapes = [(n, True) for n in _PADDED] + [(MOST_VECTORS, False)]
    return [
        _variant(kernel, dtype, n, tf32, wide)
        for kernel in (interact_kernel, interact_backward_kernel)
        for dtype, tf32 in ((torch.float32, False), *((dtype, True) for dtype in FLOATS))
        for n, wide in shapes
    ]


def _variant(kernel: object, dtype: torch.dtype, count: int, tf32: bool, wide: bool) -> Variant:
    # Lengths that are no multiples of 16 are rare, so they have one variant for every count.
    padded = next(n for n in _PADDED if count <= n) if wide else MOST_VECTORS
    exact = dtype == torch.float32 and not tf32
    return _listed_variant(kernel, dtype, padded, exact, wide)


@cache
def _listed_variant(
    kernel: object, dtype: torch.dtype, padded: int, exact: bool, wide: bool
) -> Variant:
    pointer = "*" + TYPES[dtype]
    forward = kernel is interact_kernel
    pointers: tuple[str, ...] = ("dense", "vectors", "out") if forward else (
        "gradient", "dense", "vectors", "to_dense", "to_vectors"
    )  # fmt: skip
    strides: tuple[str, ...] = ("dense_stride", "vectors_stride", "vector_stride")
    strides += ("out_stride",) if forward else ("gradient_stride",)
    integers: tuple[str, ...] = (*strides, "count", "dim", "self_interaction")
    return Variant(
        kernel=kernel,
        types={**dict.fromkeys(pointers, pointer), **dict.fromkeys(integers, "i64")},
        constants={
            "VECTORS": padded,
            # 128 bytes of every vector at a time, or what registers hold.
            "COLUMNS": 16 if exact and padded == MOST_VECTORS else 128 // dtype.itemsize,
            "PRECISION": "ieee" if exact else "tf32",
            "WIDE": wide,
        },
        aligned=pointers,
        num_warps=8
        if exact and padded == MOST_VECTORS and not forward
        else 4
        if padded >= 32
        else 2,
        num_stages=3,
        since=80,
        fused_multiply_add=True,
    )


def _check(what: str, dense: Tensor, vectors: Tensor) -> None:
    fits = dense.dim() == 2 and vectors.dim() == 3
    if not fits or (vectors.shape[0], vectors.shape[2]) != tuple(dense.shape):
        raise InputError(
            f"{what}: the dense vector has shape {tuple(dense.shape)}, and the others "
            f"{tuple(vectors.shape)}. Pass (B, d) and (B, F, d)."
        )
    if dense.dtype not in FLOATS or dense.dtype != vectors.dtype:
        raise InputError(
            f"{what}: got {dense.dtype} and {vectors.dtype}. Pass float32, float16 or bfloat16, "
            "the same for both."
        )
    if vectors.shape[1] >= MOST_VECTORS:
        raise InputError(
            f"{what}: {vectors.shape[1]} vectors beside the dense one. Pass at most "
            f"{MOST_VECTORS - 1}."
        )
    require_gpu(what, dense, vectors)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with neighbouring columns."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _is_wide(dim: int, dense: Tensor, vectors: Tensor) -> bool:
    strides = (dense.stride(0), vectors.stride(0), vectors.stride(1))
    aligned = dense.data_ptr() % 16 == 0 and vectors.data_ptr() % 16 == 0
    return aligned and dim % 16 == 0 and all(stride % 16 == 0 for stride in strides)


# --- Kernels: one program a sample. ---


@triton.jit
def load_vectors(dense, vectors, vector_stride, begin, count, dim,
                 VECTORS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Columns begin … begin + COLUMNS of a sample's vectors (VECTORS, COLUMNS); zeros outside."""
    row = tl.arange(0, VECTORS)
    column = begin + tl.arange(0, COLUMNS)
    at = (row[:, None] - 1).to(tl.int64) * vector_stride + column[None, :]
    inside = (row > 0)[:, None] & (row < count)[:, None] & (column < dim)[None, :]
    others = tl.load(vectors + at, mask=inside, other=0.0)
    first = tl.load(dense + column, mask=column < dim, other=0.0)
    return tl.where((row == 0)[:, None], first[None, :], others)


@triton.jit(
    do_not_specialize=[
        "dense_stride", "vectors_stride", "vector_stride", "out_stride", "count", "dim",
        "self_interaction",
    ]
)  # fmt: skip
def interact_kernel(
    dense,
    vectors,
    out,
    dense_stride: tl.int64,
    vectors_stride: tl.int64,
    vector_stride: tl.int64,
    out_stride: tl.int64,
    count: tl.int64,
    dim: tl.int64,
    self_interaction: tl.int64,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    if WIDE:
        dim = dim // 16 * 16
        dense_stride = dense_stride // 16 * 16
        vectors_stride = vectors_stride // 16 * 16
        vector_stride = vector_stride // 16 * 16
    sample = tl.program_id(0).to(tl.int64)
    dense += sample * dense_stride
    vectors += sample * vectors_stride
    out += sample * out_stride
    products = tl.zeros([VECTORS, VECTORS], tl.float32)
    for begin in range(0, dim, COLUMNS):
        x = load_vectors(dense, vectors, vector_stride, begin, count, dim, VECTORS, COLUMNS)
        products = product(x, tl.trans(x), products, PRECISION)
        column = begin + tl.arange(0, COLUMNS)
        first = tl.load(dense + column, mask=column < dim, other=0.0)
        tl.store(out + column, first, mask=column < dim)
    i = tl.arange(0, VECTORS)[:, None]
    j = tl.arange(0, VECTORS)[None, :]
    diagonal = self_interaction.to(tl.int32)
    pair = i * (i - 1 + 2 * diagonal) // 2 + j
    chosen = (i < count) & (j < i + diagonal)
    tl.store(out + dim + pair, products.to(out.dtype.element_ty), mask=chosen)


@triton.jit(
    do_not_specialize=[
        "gradient_stride", "dense_stride", "vectors_stride", "vector_stride", "count", "dim",
        "self_interaction",
    ]
)  # fmt: skip
def interact_backward_kernel(
    gradient,
    dense,
    vectors,
    to_dense,
    to_vectors,
    gradient_stride: tl.int64,
    dense_stride: tl.int64,
    vectors_stride: tl.int64,
    vector_stride: tl.int64,
    count: tl.int64,
    dim: tl.int64,
    self_interaction: tl.int64,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    if WIDE:
        dim = dim // 16 * 16
        dense_stride = dense_stride // 16 * 16
        vectors_stride = vectors_stride // 16 * 16
        vector_stride = vector_stride // 16 * 16
    sample = tl.program_id(0).to(tl.int64)
    gradient += sample * gradient_stride
    dense += sample * dense_stride
    vectors += sample * vectors_stride
    to_dense += sample * dim
    to_vectors += sample * (count - 1) * dim
    # The gradient of the products as a symmetric matrix; x·x has the derivative 2x.
    i = tl.arange(0, VECTORS)[:, None]
    j = tl.arange(0, VECTORS)[None, :]
    high = tl.maximum(i, j)
    low = tl.minimum(i, j)
    diagonal = self_interaction.to(tl.int32)
    pair = high * (high - 1 + 2 * diagonal) // 2 + low
    chosen = (high < count) & (low < high + diagonal)
    matrix = tl.load(gradient + dim + pair, mask=chosen, other=0.0)
    doubled = (matrix.to(tl.float32) * 2).to(matrix.dtype)
    matrix = tl.where(i == j, doubled, matrix)
    row = tl.arange(0, VECTORS)
    for begin in range(0, dim, COLUMNS):
        x = load_vectors(dense, vectors, vector_stride, begin, count, dim, VECTORS, COLUMNS)
        result = product(matrix, x, tl.zeros([VECTORS, COLUMNS], tl.float32), PRECISION)
        column = begin + tl.arange(0, COLUMNS)
        at = (row[:, None] - 1).to(tl.int64) * dim + column[None, :]
        inside = (row > 0)[:, None] & (row < count)[:, None] & (column < dim)[None, :]
        tl.store(to_vectors + at, result.to(to_vectors.dtype.element_ty), mask=inside)
        first = tl.sum(tl.where((row == 0)[:, None], result, 0.0), 0)
        first += tl.load(gradient + column, mask=column < dim, other=0.0).to(tl.float32)
        tl.store(to_dense + column, first.to(to_dense.dtype.element_ty), mask=column < dim)
