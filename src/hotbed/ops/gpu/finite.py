"""Whether gradients are finite, found on the device and told by a flag that later kernels heed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.rows import (
    KINDS,
    Launch,
    line_split,
    load_values,
    spread,
    upload,
    vector_length,
    width_of,
)
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = ["check_finite", "clear_unless_finite", "variants"]

_BLOCK = 1024
_WIDTH = 4096  # of the rows that a contiguous array is cut into


def check_finite(arrays: Sequence[Tensor], apply: Tensor | Sequence[Tensor]) -> None:
    """Sets `apply` (1,) int32 to 0 where a value is infinite or NaN; nothing else changes it.

    Args:
        arrays: float32, float16 or bfloat16 of one or two dimensions, last stride 1.
        apply: one for all arrays, or one each.

    Raises:
        InputError: an array has another dtype or layout, or lies elsewhere than `apply`.
    """
    flags = [apply] * len(arrays) if isinstance(apply, Tensor) else apply
    if not arrays:
        return
    require_gpu("check_finite", *flags, *arrays)
    groups: dict[int, Launch] = {}
    for a, (array, flag) in enumerate(zip(arrays, flags, strict=True)):
        if array.dtype not in KINDS or array.dim() not in (1, 2) or _apart(array):
            raise InputError(
                f"check_finite: array {a} is {array.dtype} {tuple(array.shape)} of stride "
                f"{array.stride()}. Pass float32, float16 or bfloat16 rows that lie side by side."
            )
        if array.numel() == 0:
            continue
        if array.is_contiguous():
            array = array.view(-1, next(w for w in (_WIDTH, 4, 1) if array.numel() % w == 0))
        vector = vector_length(array.shape[1], [array])
        vectors, multiplier = line_split("check_finite", array.shape[1], vector)
        line = [
            vectors,
            multiplier,
            array.shape[0],
            array.data_ptr(),
            array.stride(0) * array.itemsize,
            KINDS[array.dtype],
            flag.data_ptr(),
        ]
        blocks = -(-array.shape[0] * vectors // _BLOCK)
        groups.setdefault(vector, Launch()).add(line, blocks)
    for vector, group in groups.items():
        launch(_variant(vector), group.most, lines=upload(group.lines, flags[0].device))


def _apart(array: Tensor) -> bool:
    """Whether the values of a row do not lie side by side."""
    return array.shape[-1] > 1 and array.stride(-1) != 1


def variants() -> list[Variant]:
    """Every variant of the check."""
    return [_variant(4), _variant(1)]


@cache
def _variant(vector: int) -> Variant:
    return Variant(
        kernel=finite_kernel,
        types={"lines": "*i64"},
        constants={"VECTOR": vector, "BLOCK": _BLOCK},
    )


# --- Kernels. ---


@triton.jit
def clear_unless_finite(apply, values):
    """Sets the int32 at the address `apply`, if that is not 0, to 0 where a value is not finite."""
    bits = values.to(tl.uint32, bitcast=True) & 0x7F800000
    bad = tl.max(tl.max((bits == 0x7F800000).to(tl.int32), 1), 0)
    tl.store(apply.to(tl.pointer_type(tl.int32)), 0, mask=(bad != 0) & (apply != 0))


@triton.jit
def finite_kernel(lines, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    line = lines + tl.program_id(1) * 7  # the fields above
    row, column = spread(tl.program_id(0).to(tl.int64), tl.load(line), tl.load(line + 1), BLOCK)
    kind = tl.load(line + 5)
    begin = tl.load(line + 3) + row * tl.load(line + 4)
    address = begin + column * (VECTOR * width_of(kind, 0))
    values = load_values(address, kind, row < tl.load(line + 2), 0, VECTOR)
    clear_unless_finite(tl.load(line + 6), values)
