"""Ids of static tables on the device → slots, checked there: a bad id stops the step, not the host."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.rows import NO_SLOT
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = ["slots_of", "variants"]

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


def variants() -> list[Variant]:
    """Every variant of the check."""
    return [_variant(torch.int64), _variant(torch.int32)]


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
