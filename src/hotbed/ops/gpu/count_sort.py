"""A stable sort of few different keys by counting: it moves fewer bytes than a general one."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.gpu.variants import Variant, launch

__all__ = ["FEW_KEYS", "count_sort", "variants"]

FEW_KEYS = 512
"""Beyond as many, the counts of all spans are more than what a sort moves."""

_SPAN, _PART = 512, 64  # positions that a program counts, and those it compares at a time


def count_sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """As ``torch.sort(keys, stable=True)`` for (n,) int32 keys in [0, FEW_KEYS), n > 0."""
    n = keys.shape[0]
    spans = -(-n // _SPAN)
    counts = torch.empty((spans, FEW_KEYS), dtype=torch.int32, device=keys.device)
    launch(_count_variant(), (spans,), keys=keys, counts=counts, n=n)
    so_far = counts.cumsum(0)
    of_key = so_far[-1]
    begins = so_far - counts + (of_key.cumsum(0) - of_key)
    order = torch.empty(n, dtype=torch.int64, device=keys.device)
    ordered = torch.empty_like(keys)
    launch(_place_variant(), (spans,), keys=keys, begins=begins, order=order, ordered=ordered, n=n)
    return ordered, order


def variants() -> list[Variant]:
    """Every variant of the sort."""
    return [_count_variant(), _place_variant()]


@cache
def _count_variant() -> Variant:
    return Variant(
        kernel=count_kernel,
        types={"keys": "*i32", "counts": "*i32", "n": "i64"},
        constants={"SPAN": _SPAN, "BINS": FEW_KEYS},
    )


@cache
def _place_variant() -> Variant:
    return Variant(
        kernel=place_kernel,
        types={"keys": "*i32", "begins": "*i64", "order": "*i64", "ordered": "*i32", "n": "i64"},
        constants={"SPAN": _SPAN, "PART": _PART, "BINS": FEW_KEYS},
    )


# --- Kernels. ---


@triton.jit(do_not_specialize=["n"])
def count_kernel(keys, counts, n: tl.int64, SPAN: tl.constexpr, BINS: tl.constexpr):
    """How often each key occurs among SPAN positions."""
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    key = tl.load(keys + at, mask=at < n, other=0)
    count = tl.histogram(key, BINS, mask=at < n)
    tl.store(counts + tl.program_id(0).to(tl.int64) * BINS + tl.arange(0, BINS), count)


@triton.jit(do_not_specialize=["n"])
def place_kernel(
    keys,
    begins,
    order,
    ordered,
    n: tl.int64,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    BINS: tl.constexpr,
):
    """Puts each position behind the earlier ones of its key."""
    span = tl.program_id(0).to(tl.int64)
    for part in range(0, SPAN, PART):
        at = span * SPAN + part + tl.arange(0, PART)
        key = tl.load(keys + at, mask=at < n, other=-1)
        earlier = tl.zeros([PART], tl.int32)
        for other_part in range(0, part + PART, PART):
            other = span * SPAN + other_part + tl.arange(0, PART)
            other_key = tl.load(keys + other, mask=other < n, other=-1)
            same = (key[:, None] == other_key[None, :]) & (other[None, :] < at[:, None])
            earlier += tl.sum(same.to(tl.int32), 1)
        begin = tl.load(begins + span * BINS + key, mask=at < n, other=0)
        tl.store(order + begin + earlier, at, mask=at < n)
        tl.store(ordered + begin + earlier, key, mask=at < n)
