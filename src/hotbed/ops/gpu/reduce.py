"""Segment sum: the terms of a slot (see `terms`) → its gradient row, in float32.

Twin of csrc/batch/reduce.cpp. Every CHUNK positions of a slot, from its first on, are a chunk, summed by
threads of its own; every CHUNK of its chunks are a group, summed likewise. A slot's row is the sum
of its groups, then the chunks behind them, then the terms behind those. So an id that takes a tenth
of the batch delays nobody, and what is added in which order depends on nothing but the slot's own
positions: not on how slots are numbered, nor on which others there are. Slots with fewer than two
chunks are summed in the order of the batch, with the bits of the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.gpu.chunks import CHUNK, chunk_begin, first_chunk
from hotbed.ops.gpu.finite import clear_unless_finite
from hotbed.ops.gpu.rows import (
    Launch,
    address_of,
    at32,
    at64,
    line_split,
    load_values,
    only_if,
    programs,
    spread,
    store_values,
    upload,
    width_of,
)
from hotbed.ops.gpu.terms import (
    ADDRESSES,
    CHUNK_SLOTS,
    CHUNK_SUMS,
    GROUP_SUMS,
    KIND,
    SCALES,
    STARTS,
    SUM_BYTES,
    TABLE_STARTS,
    Terms,
)
from hotbed.ops.gpu.variants import Variant, launch

__all__ = ["reduce", "sum_chunks", "variants"]

_BLOCK = 128  # vectors a program sums at a time
_UNROLL = 4  # terms of a row that are on their way at once


def sum_chunks(terms: Terms) -> None:
    """Sums the chunks of slots, then the groups of CHUNK chunks."""
    device = terms.header.device
    for level, sums in ((1, terms.chunk_sums), (2, terms.group_sums)):
        for vector, tables in _by_vector(terms).items():
            lines = [[t, *line_split("reduce", terms.dims[t], vector)] for t in tables]
            count = min(sums.shape[0], -(-max(terms.index.table_positions) // CHUNK**level))
            blocks = max(-(-count * vectors // _BLOCK) for _, vectors, _ in lines)
            launch(
                _chunks_variant(level, vector),
                (programs(blocks, device), len(lines)),
                lines=upload(lines, device),
                header=terms.header,
            )


def reduce(
    terms: Terms,
    apply: Tensor | Sequence[Tensor] | None = None,
    tables: Sequence[int] | None = None,
) -> list[Tensor]:
    """The gradient rows of tables: (positions of the table, dim) float32 each.

    Row u is that of the u-th of the table's slots in the index; rows behind the last are undefined.

    Args:
        terms: of the batch, after `sum_chunks`.
        apply: (1,) int32, set to 0 where a row has an infinity or a NaN; one for all of `tables`,
            or one each.
        tables: which; None: all.
    """
    device = terms.header.device
    wanted = range(len(terms.dims)) if tables is None else tables
    flags: dict[int, Tensor | None]
    if apply is None or isinstance(apply, Tensor):
        flags = dict.fromkeys(wanted, apply)
    else:
        flags = dict(zip(wanted, apply, strict=True))
    rows = {
        t: torch.empty((terms.index.table_positions[t], terms.dims[t]), device=device)
        for t in wanted
    }
    for vector, members in _by_vector(terms).items():
        group = Launch()
        for t in members:
            if t in rows:
                split = line_split("reduce", terms.dims[t], vector)
                line = [t, *split, rows[t].data_ptr(), address_of(flags[t])]
                group.add(line, -(-rows[t].numel() // (vector * _BLOCK)))
        if group.lines:
            launch(
                _reduce_variant(vector),
                (programs(group.blocks, device), len(group.lines)),
                lines=upload(group.lines, device),
                header=terms.header,
            )
    return [rows[t] for t in wanted]


def _by_vector(terms: Terms) -> dict[int, list[int]]:
    """Tables that have gradients, by the length of their vectors."""
    groups: dict[int, list[int]] = {}
    for t, (vector, dim) in enumerate(zip(terms.vectors, terms.dims, strict=True)):
        if dim and terms.index.table_positions[t]:
            groups.setdefault(vector, []).append(t)
    return groups


def variants() -> list[Variant]:
    """Every variant of the segment sum."""
    chunks = [_chunks_variant(level, vector) for level in (1, 2) for vector in (4, 1)]
    return [*chunks, _reduce_variant(4), _reduce_variant(1)]


@cache
def _chunks_variant(level: int, vector: int) -> Variant:
    return Variant(
        kernel=sum_chunks_kernel,
        types={"lines": "*i64", "header": "*i64"},
        constants={"LEVEL": level, "VECTOR": vector, "BLOCK": _BLOCK, "UNROLL": _UNROLL},
    )


@cache
def _reduce_variant(vector: int) -> Variant:
    return Variant(
        kernel=reduce_kernel,
        types={"lines": "*i64", "header": "*i64"},
        constants={"VECTOR": vector, "BLOCK": _BLOCK, "UNROLL": _UNROLL},
    )


# --- Kernels. ---

# The fields of a line.
_TABLE, _VECTORS, _MULTIPLIER, _ROWS, _APPLY = map(tl.constexpr, range(5))
_CHUNK_FIELDS, _REDUCE_FIELDS = tl.constexpr(3), tl.constexpr(5)
_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def add_terms(
    sums,
    header,
    first,
    count,
    column,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """sums plus the `count` terms (BLOCK,) from `first` on."""
    addresses, scales = tl.load(header + ADDRESSES), tl.load(header + SCALES)
    kind = tl.load(header + KIND)
    begin = column * (VECTOR * width_of(kind, 0))
    for k in range(0, tl.max(count, 0), UNROLL):
        for j in tl.static_range(UNROLL):
            at = first + (k + j)
            inside = k + j < count
            address = tl.load(at64(addresses) + at, mask=inside, other=0)
            inside = inside & (address != 0)
            scale = tl.load(at32(scales) + at, mask=only_if(scales != 0, inside), other=1.0)
            sums += scale[:, None] * load_values(address + begin, kind, inside, 0, VECTOR)
    return sums


@triton.jit
def add_sums(
    sums,
    below,
    width,
    first,
    count,
    column,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The same for rows of sums, which begin at `below` and take `width` bytes each."""
    for k in range(0, tl.max(count, 0), UNROLL):
        for j in tl.static_range(UNROLL):
            address = below + (first + (k + j)) * width + column * (VECTOR * 4)
            sums += load_values(address, 0, k + j < count, 4, VECTOR)
    return sums


@triton.jit
def sum_terms(
    header,
    slot,
    column,
    live,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The vectors `column` (BLOCK,) of the gradient rows of the slots numbered `slot` (BLOCK,)."""
    starts = at64(tl.load(header + STARTS))
    start = tl.load(starts + slot, mask=live, other=0)
    end = tl.load(starts + slot + 1, mask=live, other=0)
    chunk, chunks = first_chunk(start), (end - start) // _CHUNK
    # What is counted here fits one register each; 64 bits would take two.
    groups = (chunks // _CHUNK).to(tl.int32)
    chunks_behind = (chunks % _CHUNK).to(tl.int32)
    terms_behind = ((end - start) % _CHUNK).to(tl.int32)
    width = tl.load(header + SUM_BYTES)
    sums = tl.zeros([BLOCK, VECTOR], tl.float32)
    below = tl.load(header + GROUP_SUMS)
    sums = add_sums(sums, below, width, first_chunk(chunk), groups, column, VECTOR, UNROLL)
    below = tl.load(header + CHUNK_SUMS)
    first = chunk + chunks // _CHUNK * _CHUNK
    sums = add_sums(sums, below, width, first, chunks_behind, column, VECTOR, UNROLL)
    return add_terms(sums, header, start + chunks * _CHUNK, terms_behind, column, VECTOR, UNROLL)


@triton.jit
def sum_chunks_kernel(
    lines,
    header,
    LEVEL: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    line = lines + tl.program_id(1) * _CHUNK_FIELDS
    vectors, multiplier = tl.load(line + _VECTORS), tl.load(line + _MULTIPLIER)
    table_starts = at64(tl.load(header + TABLE_STARTS)) + tl.load(line + _TABLE)
    starts, chunk_slots = at64(tl.load(header + STARTS)), at64(tl.load(header + CHUNK_SLOTS))
    width = tl.load(header + SUM_BYTES)
    # The numbers that the table's chunks, or groups of chunks, may have.
    begin = first_chunk(tl.load(starts + tl.load(table_starts)))
    end = first_chunk(tl.load(starts + tl.load(table_starts + 1)))
    if LEVEL == 2:
        begin, end = first_chunk(begin), first_chunk(end)
    blocks = tl.maximum((end - begin) * vectors + BLOCK - 1, 0) // BLOCK
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at, column = spread(block, vectors, multiplier, BLOCK)
        at += begin
        live = at < end
        sums = tl.zeros([BLOCK, VECTOR], tl.float32)
        if LEVEL == 1:
            slot = tl.load(chunk_slots + at, mask=live, other=-1)
            whole = slot >= 0
            first = chunk_begin(tl.load(starts + slot, mask=whole, other=0), at)
            count = tl.where(whole, _CHUNK, 0)
            sums = add_terms(sums, header, first, count, column, VECTOR, UNROLL)
            out = tl.load(header + CHUNK_SUMS) + at * width
        else:
            slot = tl.load(chunk_slots + at * _CHUNK, mask=live, other=-1)
            whole = slot >= 0
            start = tl.load(starts + slot, mask=whole, other=0)
            chunks = (tl.load(starts + slot + 1, mask=whole, other=0) - start) // _CHUNK
            chunk = first_chunk(start)
            first = chunk_begin(chunk, at)
            whole = first + _CHUNK <= chunk + chunks
            count = tl.where(whole, _CHUNK, 0)
            below = tl.load(header + CHUNK_SUMS)
            sums = add_sums(sums, below, width, first, count, column, VECTOR, UNROLL)
            out = tl.load(header + GROUP_SUMS) + at * width
        store_values(out + column * (VECTOR * 4), sums, 0, whole, 4, VECTOR)


@triton.jit
def reduce_kernel(
    lines,
    header,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    line = lines + tl.program_id(1) * _REDUCE_FIELDS
    vectors, multiplier = tl.load(line + _VECTORS), tl.load(line + _MULTIPLIER)
    table_starts = at64(tl.load(header + TABLE_STARTS)) + tl.load(line + _TABLE)
    first_slot = tl.load(table_starts)
    count = tl.load(table_starts + 1) - first_slot
    apply = tl.load(line + _APPLY)
    blocks = (count * vectors + BLOCK - 1) // BLOCK
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row, column = spread(block, vectors, multiplier, BLOCK)
        live = row < count
        sums = sum_terms(header, first_slot + row, column, live, VECTOR, BLOCK, UNROLL)
        out = tl.load(line + _ROWS) + (row * vectors + column) * (VECTOR * 4)
        store_values(out, sums, 0, live, 4, VECTOR)
        clear_unless_finite(apply, sums)
