"""The gradient of per-sample weights: of each position, its bag's gradient times its row.

Twin of `weight_gradients` in csrc/batch/pool.cpp. With g the gradient of a bag, v the row of a position,
y the bag's vector and d what the bag was divided by: sum g·v; mean (g·v − g·y) / d;
sqrtn g·v / d − g·y · w / d².
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.pool import COMBINERS, FeatureSlots, check_features, row_address, slot_taken
from hotbed.ops.gpu.rows import (
    KINDS,
    Launch,
    address_of,
    at32,
    at64,
    last_not_above,
    only_if,
    read_values,
    upload,
    vector_length,
    width_class,
    width_of,
)
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = ["variants", "weight_gradients"]

_POSITIONS = 8  # of a program
_VECTORS_READ = 32  # of a row, at a time


def weight_gradients(
    planes: Sequence[Tensor],
    features: Sequence[FeatureSlots],
    grads: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    inverses: Sequence[Tensor | None] | None = None,
) -> list[Tensor | None]:
    """(n,) float32 for each feature that has weights, zeros where no gradient came; else None.

    Args:
        planes, features, inverses: of the forward, `pool_into`. The rows must not have changed.
        grads: (bags, dim) float32, float16 or bfloat16, or None for a feature that took no part.
        outputs: what the forward wrote.

    Raises:
        InputError: a gradient or an output has another shape, dtype or layout, or an inverse is
            missing.
    """
    inverses = inverses or [None] * len(features)
    check_features(planes, features)
    results: list[Tensor | None] = []
    groups: dict[tuple[int, int], Launch] = {}
    steps = 0
    for f, (feature, grad, out, inverse) in enumerate(
        zip(features, grads, outputs, inverses, strict=True)
    ):
        if feature.weights is None or feature.combiner == "none":
            results.append(None)
            continue
        if grad is None or feature.positions == 0:
            results.append(torch.zeros_like(feature.weights))
            continue
        plane = planes[feature.table]
        dim = plane.shape[1]
        _check(f, feature, dim, grad, out, inverse)
        require_gpu("weight_gradients", plane, grad, out)
        result = torch.empty_like(feature.weights)
        results.append(result)
        vector = vector_length(dim, [plane, grad, out, feature.scratch])
        line = [
            feature.positions,
            dim // vector,
            feature.bags,
            plane.data_ptr(),
            address_of(feature.scratch),
            KINDS[plane.dtype],
            feature.slots.data_ptr(),
            address_of(feature.offsets),
            feature.fixed,
            feature.weights.data_ptr(),
            COMBINERS[feature.combiner],
            feature.padding_slot,
            grad.data_ptr(),
            grad.stride(0) * grad.itemsize,
            KINDS[grad.dtype],
            out.data_ptr() if feature.combiner != "sum" else 0,
            out.stride(0) * out.itemsize,
            KINDS[out.dtype],
            address_of(inverse) if feature.divided else 0,
            result.data_ptr(),
        ]
        blocks = -(-feature.positions // _POSITIONS)
        shared = width_class(plane.itemsize, vector), vector
        groups.setdefault(shared, Launch()).add(line, blocks)
        steps = max(steps, feature.bags.bit_length())
    for shared, group in groups.items():
        lines = upload(group.lines, planes[0].device)
        launch(_variant(*shared), group.most, lines=lines, bag_steps=steps)
    return results


def _check(
    f: int, feature: FeatureSlots, dim: int, grad: Tensor, out: Tensor, inverse: Tensor | None
) -> None:
    """Raise InputError where tensors of feature number `f` are not as they must be."""
    for name, tensor in (("gradient", grad), ("output", out)):
        askew = dim > 1 and tensor.stride(1) != 1
        if tensor.shape != (feature.bags, dim) or tensor.dtype not in KINDS or askew:
            raise InputError(
                f"weight_gradients: the {name} of feature {f} is {tensor.dtype} "
                f"{tuple(tensor.shape)} of stride {tensor.stride()}. Pass float32, float16 or "
                f"bfloat16 {(feature.bags, dim)} whose columns lie side by side."
            )
    if feature.divided and inverse is None:
        raise InputError(
            f"weight_gradients: feature {f} has the combiner {feature.combiner!r}. Pass the "
            "inverse that pool_into wrote."
        )


def variants() -> list[Variant]:
    """Every variant of the gradient of weights."""
    return [_variant(4, 4), _variant(2, 4), _variant(0, 1)]


@cache
def _variant(width: int, vector: int) -> Variant:
    return Variant(
        kernel=weight_gradients_kernel,
        types={"lines": "*i64", "bag_steps": "i64"},
        constants={
            "WIDTH": width,
            "VECTOR": vector,
            "POSITIONS": _POSITIONS,
            "COLUMNS": _VECTORS_READ * vector,
        },
    )


# --- Kernels. ---

# The fields of a line, in the order above.
_COUNT, _VECTORS, _BAGS, _PLANE, _SCRATCH, _KIND, _SLOTS, _OFFSETS, _FIXED, _WEIGHTS = map(
    tl.constexpr, range(10)
)
_COMBINER, _PADDING, _GRAD, _GRAD_STRIDE, _GRAD_KIND, _OUT, _OUT_STRIDE, _OUT_KIND = map(
    tl.constexpr, range(10, 18)
)
_INVERSE, _RESULT = tl.constexpr(18), tl.constexpr(19)
_FIELDS = tl.constexpr(20)
_MEAN, _SQRTN = tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["bag_steps"])
def weight_gradients_kernel(
    lines,
    bag_steps: tl.int64,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    line = lines + tl.program_id(1) * _FIELDS
    at = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    live = at < tl.load(line + _COUNT)
    offsets, fixed = tl.load(line + _OFFSETS), tl.load(line + _FIXED)
    bags = tl.where(offsets != 0, tl.load(line + _BAGS), 1)
    found = last_not_above(at64(offsets), 1, bags, tl.where(live, at, 0), bag_steps)
    bag = tl.where(offsets != 0, found, at // tl.maximum(fixed, 1))
    scratch = tl.load(line + _SCRATCH)
    slot = tl.load(at64(tl.load(line + _SLOTS)) + at, mask=live, other=-(2**63))
    taken = slot_taken(slot, tl.load(line + _PADDING), scratch)
    dim = tl.load(line + _VECTORS) * VECTOR
    kind = tl.load(line + _KIND)
    row = row_address(tl.load(line + _PLANE), scratch, slot, dim * width_of(kind, WIDTH))
    grad = tl.load(line + _GRAD) + bag * tl.load(line + _GRAD_STRIDE)
    out = tl.load(line + _OUT)
    pooled = only_if(out != 0, taken)
    out += bag * tl.load(line + _OUT_STRIDE)
    grad_kind, out_kind = tl.load(line + _GRAD_KIND), tl.load(line + _OUT_KIND)

    products = tl.zeros([POSITIONS, COLUMNS], tl.float32)
    pooled_products = tl.zeros([POSITIONS, COLUMNS], tl.float32)
    for begin in range(0, dim, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (column < dim)[None, :]
        g = read_values(grad, column, grad_kind, taken[:, None] & inside, 0, VECTOR)
        v = read_values(row, column, kind, taken[:, None] & inside, WIDTH, VECTOR)
        y = read_values(out, column, out_kind, pooled[:, None] & inside, 0, VECTOR)
        products += g * v
        pooled_products += g * y
    product, pooled_product = tl.sum(products, 1), tl.sum(pooled_products, 1)
    inverses = tl.load(line + _INVERSE)
    inverse = tl.load(at32(inverses) + bag, mask=only_if(inverses != 0, taken), other=1.0)
    weight = tl.load(at32(tl.load(line + _WEIGHTS)) + at, mask=taken, other=0.0)
    combiner = tl.load(line + _COMBINER)
    mean = (product - pooled_product) * inverse
    root = product * inverse - pooled_product * weight * inverse * inverse
    result = tl.where(combiner == _MEAN, mean, tl.where(combiner == _SQRTN, root, product))
    tl.store(at32(tl.load(line + _RESULT)) + at, tl.where(taken, result, 0.0), mask=live)
