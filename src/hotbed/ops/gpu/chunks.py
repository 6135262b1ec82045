"""How the positions of a slot that many use are cut into chunks, which are summed beside each other."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.gpu.rows import last_not_above, only_if
from hotbed.ops.gpu.variants import Variant, launch

__all__ = ["CHUNK", "chunk_begin", "chunk_slots", "first_chunk", "variants"]

CHUNK = 32
"""Positions of a chunk: what one running sum adds up of a slot that many positions use.

A slot is cut into chunks from its own first position on, so that no other slot decides where they
begin. Each holds just one of the positions 0, CHUNK, 2 CHUNK, ... of the order, which numbers it among
the chunks of all slots.
"""

_BLOCK = 256


def chunk_slots(starts: Tensor, table_starts: Tensor, n: int) -> Tensor:
    """`TransposedIndex.chunk_slots` of an index of n positions."""
    chunks = -(-n // CHUNK)
    result = torch.empty(chunks, dtype=torch.int64, device=starts.device)
    launch(
        _variant(),
        (-(-chunks // _BLOCK),),
        starts=starts,
        used=table_starts[-1:],
        result=result,
        chunks=chunks,
        steps=max(starts.shape[0], 1).bit_length(),
    )
    return result


def variants() -> list[Variant]:
    """Every variant."""
    return [_variant()]


@cache
def _variant() -> Variant:
    arrays = dict.fromkeys(("starts", "used", "result"), "*i64")
    return Variant(
        kernel=chunks_kernel,
        types={**arrays, "chunks": "i64", "steps": "i64"},
        constants={"BLOCK": _BLOCK},
    )


# --- Kernels. ---

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def first_chunk(begin):
    """The number of the first chunk of what begins at `begin`; the others follow it."""
    return (begin + (_CHUNK - 1)) // _CHUNK


@triton.jit
def chunk_begin(begin, number):
    """Where the chunk with that number begins, of what begins at `begin` itself."""
    return begin + (number - first_chunk(begin)) * _CHUNK


@triton.jit(do_not_specialize=["chunks", "steps"])
def chunks_kernel(
    starts,
    used,
    result,
    chunks: tl.int64,
    steps: tl.int64,
    BLOCK: tl.constexpr,
):
    """The slot of the chunk with each number, or -1."""
    chunk = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = chunk < chunks
    count = tl.load(used)
    slot = last_not_above(starts, 1, count, tl.where(live, chunk * _CHUNK, 0), steps)
    begin = tl.load(starts + slot, mask=live, other=0)
    end = tl.load(starts + slot + 1, mask=only_if(count > 0, live), other=0)
    whole = chunk_begin(begin, chunk) + _CHUNK <= end
    tl.store(result + chunk, tl.where(whole, slot, -1), mask=live)
