"""Inputs on the device, checked there: ids of static tables → slots. What is bad stops the step, not
the host."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.rows import NO_SLOT, at64, only_if, upload
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = ["GOOD", "Array", "check_arrays", "slots_of", "variants"]

GOOD = 2**62
"""Where the first bad element lies of an array that has none."""

_BLOCK = 512


def slots_of(ids: Tensor, rows: int, apply: Tensor, first_bad: Tensor) -> Tensor:
    """The slots (n,) int64 of a static table's ids: the ids themselves.

    An id outside [0, rows) becomes NO_SLOT, so that nothing is read or written for it, and the step
    is refused.

    Args:
        ids: (n,) int32 or int64, contiguous.
        apply: (1,) int32, set to 0 where an id is outside.
        first_bad: (1,) int64, lowered to the first position whose id is outside. Its owner fills it
            with a number above all positions, and reads it when he raises, a step later.

    Raises:
        InputError: a tensor has another dtype, shape or device.
    """
    require_gpu("slots_of", ids, apply, first_bad)
    wanted = (("ids", ids, (torch.int64, torch.int32)), ("apply", apply, (torch.int32,)),
              ("first_bad", first_bad, (torch.int64,)))  # fmt: skip
    for name, tensor, dtypes in wanted:
        alone = name == "ids" or tensor.shape == (1,)
        if (
            tensor.dtype not in dtypes
            or tensor.dim() != 1
            or not tensor.is_contiguous()
            or not alone
        ):
            raise InputError(
                f"slots_of: {name} is {tensor.dtype} {tuple(tensor.shape)} of stride "
                f"{tensor.stride()}. Pass contiguous {' or '.join(map(str, dtypes))} "
                f"{'(n,)' if name == 'ids' else '(1,)'}."
            )
    slots = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    n = ids.shape[0]
    launch(
        _variant(ids.dtype),
        (-(-n // _BLOCK),),
        ids=ids,
        slots=slots,
        apply=apply,
        first_bad=first_bad,
        n=n,
        rows=rows,
    )
    return slots


class Array(IntEnum):
    """Kind of an array of integers."""

    IDS = 0
    """Of a static table; become slots, a bad one NO_SLOT."""
    OFFSETS = 1
    """Rising from 0 to `limit`; come out within that, and so can be read by."""
    SLOTS = 2
    """Below `limit`; -1 names none, and is good. They come out as ids do."""


def check_arrays(
    arrays: Sequence[tuple[Array, Tensor, int]],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Checks all inputs of a batch by one launch.

    Args:
        arrays: (what it is, (n,) contiguous int64, of ids also int32, and its `limit`: the rows, or
            the number of positions), all on one device.

    Returns:
        (n,) int64 of each; told (arrays + 1,) int64: 1 where all is good, else 0, and for each
        array the position of its first bad element, or GOOD; and (1,) int32, the first of `reported`.

    Raises:
        InputError: an array has another dtype or layout, or lies elsewhere.
    """
    require_gpu("check_arrays", *(array for _, array, _ in arrays))
    device = arrays[0][1].device
    reported = upload([[1] + [GOOD] * len(arrays)], device)[0].clone()
    results = []
    lines = []
    most = 0
    for kind, array, limit in arrays:
        wide = array.dtype == torch.int64
        if (
            not (wide or (array.dtype == torch.int32 and kind == Array.IDS))
            or array.dim() != 1
            or not array.is_contiguous()
        ):
            raise InputError(
                f"check_arrays: {kind.name.lower()} are {array.dtype} {tuple(array.shape)} of stride "
                f"{array.stride()}. Pass contiguous int64 (n,)."
            )
        result = torch.empty(array.shape, dtype=torch.int64, device=device)
        results.append(result)
        most = max(most, array.shape[0])
        lines.append([int(kind), array.shape[0], int(wide), array.data_ptr(), limit,
                      result.data_ptr()])  # fmt: skip
    launch(
        _arrays_variant(),
        (-(-most // _BLOCK), len(arrays)),
        lines=upload(lines, device),
        reported=reported,
    )
    return results, reported, reported[:1].view(torch.int32)[:1]  # the lower half


def variants() -> list[Variant]:
    """Every variant of the checks."""
    return [_variant(torch.int64), _variant(torch.int32), _arrays_variant()]


@cache
def _arrays_variant() -> Variant:
    return Variant(
        kernel=arrays_kernel,
        types={"lines": "*i64", "reported": "*i64"},
        constants={"BLOCK": _BLOCK},
    )


@cache
def _variant(dtype: torch.dtype) -> Variant:
    return Variant(
        kernel=slots_of_kernel,
        types={
            "ids": "*i64" if dtype == torch.int64 else "*i32",
            "slots": "*i64",
            "apply": "*i32",
            "first_bad": "*i64",
            "n": "i64",
            "rows": "i64",
        },
        constants={"BLOCK": _BLOCK},
    )


# --- Kernels. ---

_NO_SLOT = tl.constexpr(NO_SLOT)


@triton.jit(do_not_specialize=["n", "rows"])
def slots_of_kernel(ids, slots, apply, first_bad, n: tl.int64, rows: tl.int64, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    id = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    bad = live & ((id < 0) | (id >= rows))
    tl.store(slots + at, tl.where(bad, _NO_SLOT, id), mask=live)
    first = tl.min(tl.where(bad, at, 2**62), 0)
    tl.store(apply, 0, mask=first < 2**62)
    # The lowest of integers is the same in any order.
    tl.atomic_min(first_bad, first, mask=first < 2**62)


# The fields of a line of `arrays_kernel`.
_WHAT, _COUNT, _WIDE, _ARRAY, _LIMIT, _RESULT = map(tl.constexpr, range(6))
_FIELDS = tl.constexpr(6)
_OFFSETS_KIND, _SLOTS_KIND = tl.constexpr(int(Array.OFFSETS)), tl.constexpr(int(Array.SLOTS))


@triton.jit
def arrays_kernel(lines, reported, BLOCK: tl.constexpr):
    line = lines + tl.program_id(1) * _FIELDS
    what, count, limit = tl.load(line + _WHAT), tl.load(line + _COUNT), tl.load(line + _LIMIT)
    array, wide = tl.load(line + _ARRAY), tl.load(line + _WIDE) != 0
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    value = tl.load(at64(array) + at, mask=only_if(wide, live), other=0)
    short = array.to(tl.pointer_type(tl.int32)) + at
    narrow = tl.load(short, mask=only_if(wide == 0, live), other=0)
    value = tl.where(wide, value, narrow.to(tl.int64))
    none = only_if(what == _SLOTS_KIND, value == -1)
    id_bad = ((value < 0) | (value >= limit)) & (none == 0)
    # Offsets begin at 0, do not fall, and end at the limit.
    inner = only_if(what == _OFFSETS_KIND, live & (at > 0))
    before = tl.load(at64(array) + at - 1, mask=inner, other=0)
    ends = ((at == 0) & (value != 0)) | ((at == count - 1) & (value != limit))
    offset_bad = (value < before) | ends  # as is any that has one outside
    bad = live & tl.where(what == _OFFSETS_KIND, offset_bad, id_bad)
    within = tl.where(value < 0, 0, tl.where(value > limit, limit, value))
    slot = tl.where(id_bad | none, _NO_SLOT, value)
    result = tl.where(what == _OFFSETS_KIND, within, slot)
    tl.store(at64(tl.load(line + _RESULT)) + at, result, mask=live)
    first = tl.min(tl.where(bad, at, 2**62), 0)
    tl.store(reported, 0, mask=first < 2**62)
    tl.atomic_min(reported + 1 + tl.program_id(1), first, mask=first < 2**62)
