"""Terms of a slot's gradient row: the bags that its positions belong to, each weighed.

A position's term is weight / divisor of its bag times the bag's gradient. Where the terms lie in
memory is found once a backward, in the order of the transposed index; what sums them (`reduce`, or
an optimizer's update) knows nothing of features, bags and combiners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.chunks import CHUNK
from hotbed.ops.gpu.pool import FeatureSlots
from hotbed.ops.gpu.rows import (
    KINDS,
    address_of,
    at32,
    at64,
    last_not_above,
    upload,
    vector_length,
)
from hotbed.ops.gpu.transpose import TransposedIndex, bases_of
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = ["Terms", "gradient_terms", "variants"]

_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a batch's gradient rows; made by `gradient_terms`.

    Args:
        index: the transposed index.
        dims: of each table.
        vectors: for each table, how many values of a gradient a thread may move at once: 4 or 1.
        header: one line of addresses and numbers for kernels (`sum_terms`).
        chunk_sums: (ceil(n / CHUNK), at least the widest dim) float32: the sums of chunks, by their
            numbers. What has no chunk is undefined.
        group_sums: (ceil(n / CHUNK²), the same) float32: of groups of CHUNK chunks of one slot, which
            are cut and numbered as chunks of positions are.
        grads: the gradients of the bags.
        grad_tables: the table of each.
        kept: further tensors that `header` points into.
    """

    index: TransposedIndex
    dims: tuple[int, ...]
    vectors: tuple[int, ...]
    header: Tensor
    chunk_sums: Tensor
    group_sums: Tensor
    grads: tuple[Tensor, ...]
    grad_tables: tuple[int, ...]
    kept: tuple[Tensor, ...]


def gradient_terms(
    index: TransposedIndex,
    features: Sequence[FeatureSlots],
    grads: Sequence[Tensor | None],
    dims: Sequence[int],
    inverses: Sequence[Tensor | None] | None = None,
) -> Terms:
    """Finds the terms of every slot's row. `reduce.sum_chunks` is the next step.

    Args:
        index: of `features`.
        features: the batch, as for `pool`.
        grads: for each feature (bags, dim) float32, float16 or bfloat16, all of one dtype; columns
            of a wider buffer will do. None: the feature took no part.
        dims: of each table.
        inverses: what `pool_into` wrote for the features that are `divided`.

    Raises:
        InputError: a gradient has another shape, dtype, device or layout, or an inverse is missing.
    """
    inverses = inverses or [None] * len(features)
    given = _check(features, grads, dims, inverses)
    require_gpu("reduce", index.order, *given)
    device, n = index.order.device, index.positions
    vectors = [vector_length(dim, []) for dim in dims]
    for feature, grad in zip(features, grads, strict=True):
        if grad is not None:
            fits = vector_length(dims[feature.table], [grad])
            vectors[feature.table] = min(vectors[feature.table], fits)
    scaled = any(f.divided or (f.weights is not None and f.combiner != "none") for f in features)
    addresses = torch.empty(n, dtype=torch.int64, device=device)
    scales = torch.empty(n, dtype=torch.float32, device=device) if scaled else None
    width = -(-max(dims, default=1) // 4) * 4
    chunk_sums = torch.empty((-(-n // CHUNK), width), device=device)
    group_sums = torch.empty((-(-n // CHUNK**2), width), device=device)
    header = [
        address_of(index.table_starts),
        address_of(index.starts),
        address_of(index.chunk_slots),
        address_of(addresses),
        address_of(scales),
        KINDS[given[0].dtype] if given else 0,
        address_of(chunk_sums),
        address_of(group_sums),
        width * chunk_sums.itemsize,
    ]
    lines = [
        _line(base, feature, grad, inverse)
        for base, feature, grad, inverse in zip(
            bases_of(features)[:-1], features, grads, inverses, strict=True
        )
    ]
    # One copy to the device for both.
    filled = [line + [0] * (_FIELDS.value - len(line)) for line in (header, *lines)]
    uploaded = upload(filled, device)
    if n:
        launch(
            _variant(),
            (-(-n // _BLOCK),),
            header=uploaded,
            order=index.order,
            features=len(features),
            feature_steps=len(features).bit_length(),
            bag_steps=max(f.bags for f in features).bit_length(),
            tables=len(dims),
        )
    return Terms(
        index=index,
        dims=tuple(dims),
        vectors=tuple(vectors),
        header=uploaded,
        chunk_sums=chunk_sums,
        group_sums=group_sums,
        grads=tuple(given),
        grad_tables=tuple(f.table for f, g in zip(features, grads, strict=True) if g is not None),
        kept=(addresses,) if scales is None else (addresses, scales),
    )


def _line(
    base: int, feature: FeatureSlots, grad: Tensor | None, inverse: Tensor | None
) -> list[int]:
    pooled = feature.combiner != "none"
    return [
        base,
        address_of(grad),
        0 if grad is None else grad.stride(0) * grad.itemsize,
        address_of(feature.offsets) if pooled else 0,
        feature.fixed if pooled else 1,
        feature.bags,
        address_of(feature.weights) if pooled else 0,
        address_of(inverse) if feature.divided else 0,
    ]


def _check(
    features: Sequence[FeatureSlots],
    grads: Sequence[Tensor | None],
    dims: Sequence[int],
    inverses: Sequence[Tensor | None],
) -> list[Tensor]:
    for f, (feature, grad, inverse) in enumerate(zip(features, grads, inverses, strict=True)):
        if grad is None:
            continue
        shape = (feature.bags, dims[feature.table])
        if grad.shape != shape or grad.dtype not in KINDS or (shape[1] > 1 and grad.stride(1) != 1):
            raise InputError(
                f"reduce: the gradient of feature {f} is {grad.dtype} {tuple(grad.shape)} of stride "
                f"{grad.stride()}. Pass float32, float16 or bfloat16 {shape} whose columns lie side "
                "by side."
            )
        if feature.divided and inverse is None:
            raise InputError(
                f"reduce: feature {f} has the combiner {feature.combiner!r}. Pass the inverse that "
                "pool_into wrote."
            )
    given = [g for g in grads if g is not None]
    if len({g.dtype for g in given}) > 1:
        raise InputError("reduce: the gradients have several dtypes. Pass them in one.")
    return given


def variants() -> list[Variant]:
    """Every variant of finding terms."""
    return [_variant()]


@cache
def _variant() -> Variant:
    numbers = dict.fromkeys(("features", "feature_steps", "bag_steps", "tables"), "i64")
    return Variant(
        kernel=terms_kernel,
        types={"header": "*i64", "order": "*i64", **numbers},
        constants={"BLOCK": _BLOCK},
    )


# --- Kernels. ---

# The fields of the header.
TABLE_STARTS, STARTS, CHUNK_SLOTS, ADDRESSES, SCALES, KIND, CHUNK_SUMS, GROUP_SUMS = map(
    tl.constexpr, range(8)
)
SUM_BYTES = tl.constexpr(8)  # a row of the sums
# The fields of a feature's line, in the order of `_line`.
_BASE, _GRAD, _STRIDE, _OFFSETS, _FIXED, _BAGS, _WEIGHTS, _INVERSE = map(tl.constexpr, range(8))
_FIELDS = tl.constexpr(9)


@triton.jit(do_not_specialize=["features", "feature_steps", "bag_steps", "tables"])
def terms_kernel(
    header,
    order,
    features: tl.int64,
    feature_steps: tl.int64,
    bag_steps: tl.int64,
    tables: tl.int64,
    BLOCK: tl.constexpr,
):
    """Where the gradient of each position lies, and what it is multiplied by."""
    used = tl.load(at64(tl.load(header + TABLE_STARTS)) + tables)
    end = tl.load(at64(tl.load(header + STARTS)) + used)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < end
    position = tl.load(order + at, mask=live, other=0)
    bases = header + _FIELDS + _BASE
    line = (
        header + (last_not_above(bases, _FIELDS, features, position, feature_steps) + 1) * _FIELDS
    )
    local = position - tl.load(line + _BASE, mask=live, other=0)
    offsets = tl.load(line + _OFFSETS, mask=live, other=0)
    jagged = live & (offsets != 0)
    bags = tl.load(line + _BAGS, mask=jagged, other=1)
    found = last_not_above(at64(offsets), 1, bags, local, bag_steps)
    bag = tl.where(jagged, found, local // tl.load(line + _FIXED, mask=live, other=1))
    grad = tl.load(line + _GRAD, mask=live, other=0)
    address = grad + bag * tl.load(line + _STRIDE, mask=live, other=0)
    address = tl.where(grad != 0, address, 0)
    tl.store(at64(tl.load(header + ADDRESSES)) + at, address, mask=live)
    scales = tl.load(header + SCALES)
    if scales != 0:
        weights = tl.load(line + _WEIGHTS, mask=live, other=0)
        inverses = tl.load(line + _INVERSE, mask=live, other=0)
        weight = tl.load(at32(weights) + local, mask=live & (weights != 0), other=1.0)
        inverse = tl.load(at32(inverses) + bag, mask=live & (inverses != 0), other=1.0)
        tl.store(at32(scales) + at, weight * inverse, mask=live)
