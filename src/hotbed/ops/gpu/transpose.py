"""The transposed index of a batch: for each slot of each table, the positions that use it.

Built on the device, by a sort, or by counting where there are few slots in all. Or built earlier,
by the host's look-ahead, and brought here by `on_device`. How many slots a batch has is known to
the device alone, so arrays are as long as they may have to be and the true numbers lie beside them;
nothing waits for the device.

Positions count through all features of a batch, one feature after another; n of them, T tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.chunks import chunk_slots
from hotbed.ops.gpu.count_sort import FEW_KEYS, count_sort
from hotbed.ops.gpu.pool import FeatureSlots
from hotbed.ops.gpu.rows import at64, last_not_above, upload
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = [
    "TransposedIndex",
    "bases_of",
    "on_device",
    "transpose",
    "variants",
    "with_chunks",
]

_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class TransposedIndex:
    """Which positions use a slot. All arrays are int64, contiguous, and on one device.

    Args:
        slots: (n,): the slots in use, each once, those of table 0 first. `table_starts` tells how
            many there are; what lies behind is undefined.
        starts: (n + 1,): slot u is used by positions ``order[starts[u] : starts[u + 1]]``.
        order: (n,): positions, rising for each slot. Padding is in none of them.
        table_starts: (T + 1,): the slots of table t are ``slots[table_starts[t] : table_starts[t + 1]]``.
        chunk_slots: (ceil(n / CHUNK),): u where position c * CHUNK of the order lies in a whole chunk
            of slot u, which then has the number c, else -1.
        table_positions: for each table, how many positions its features have: known to the host,
            and the most slots it can have.
    """

    slots: Tensor
    starts: Tensor
    order: Tensor
    table_starts: Tensor
    chunk_slots: Tensor
    table_positions: tuple[int, ...]

    @property
    def positions(self) -> int:
        """n."""
        return self.order.shape[0]


def bases_of(features: Sequence[FeatureSlots]) -> list[int]:
    """The first position of each feature, and the number of all."""
    bases = [0]
    for feature in features:
        bases.append(bases[-1] + feature.positions)
    return bases


def transpose(features: Sequence[FeatureSlots], rows: Sequence[int]) -> TransposedIndex:
    """Builds the transposed index of a batch on its device.

    Args:
        features: the batch, as for `pool`. Slots below 0 and a feature's `padding_slot` are in no
            group: they get no gradient.
        rows: how many slots each table has; slots are below that.

    Raises:
        InputError: the tensors do not lie on one GPU, or the tables have 2^62 slots or more.
    """
    require_gpu("transpose", *(f.slots for f in features))
    bases, n = bases_of(features), sum(f.positions for f in features)
    table_bases = [0, *itertools.accumulate(rows)]
    total = table_bases[-1]
    if total >= 2**62:
        raise InputError(f"transpose: the tables have {total} slots together. Split the batch.")
    table_positions = [0] * len(rows)
    for feature in features:
        table_positions[feature.table] += feature.positions
    device = features[0].slots.device if features else torch.device("cpu")
    if n == 0:
        return _empty(tuple(table_positions), device)

    # A key orders by table, then slot; padding comes last.
    keys = torch.empty(n, dtype=torch.int32 if total < 2**31 else torch.int64, device=device)
    lines = [
        [f.positions, f.slots.data_ptr(), f.padding_slot, base, table_bases[f.table]]
        for f, base in zip(features, bases, strict=False)
    ]
    launch(
        _keys_variant(keys.dtype),
        (-(-max(f.positions for f in features) // _BLOCK), len(features)),
        lines=upload(lines, device),
        keys=keys,
        total=total,
    )
    few = total < FEW_KEYS
    keys, order = count_sort(keys) if few else torch.sort(keys, stable=True)
    heads = torch.empty(n, dtype=torch.int32, device=device)
    blocks = -(-n // _BLOCK)
    launch(_heads_variant(keys.dtype), (blocks,), keys=keys, heads=heads, n=n, total=total)
    ranks = torch.cumsum(heads, 0)
    slots, starts = keys.new_empty(n, dtype=torch.int64), keys.new_empty(n + 1, dtype=torch.int64)
    table_starts = keys.new_empty(len(table_bases), dtype=torch.int64)
    (bounds,) = upload([table_bases], device)
    launch(
        _groups_variant(keys.dtype),
        (blocks,),
        keys=keys,
        ranks=ranks,
        bounds=bounds,
        slots=slots,
        starts=starts,
        n=n,
        total=total,
        tables=len(rows),
        steps=len(rows).bit_length(),
    )
    launch(
        _tables_variant(keys.dtype),
        (-(-len(table_bases) // _BLOCK),),
        keys=keys,
        ranks=ranks,
        bounds=bounds,
        table_starts=table_starts,
        n=n,
        tables=len(rows),
        steps=n.bit_length(),
    )
    return with_chunks(slots, starts, order, table_starts, tuple(table_positions))


def on_device(
    slots: Sequence[Tensor],
    starts: Sequence[Tensor],
    order: Sequence[Tensor],
    device: torch.device,
) -> TransposedIndex:
    """An index that was built on the host, table by table, as one on the device.

    Args:
        slots: a table's slots, (U,) each once, in any order.
        starts: (U + 1,): slot u is used by positions ``order[starts[u] : starts[u + 1]]``.
        order: (n,) positions of the batch, counted through all features, as in `TransposedIndex`;
            of any integer dtype like the others.
    """
    counts = [s.shape[0] for s in slots]
    n = sum(o.shape[0] for o in order)
    table_starts = torch.tensor([0, *counts], dtype=torch.int64, device="cpu").cumsum(0)
    begins: list[Tensor] = []
    before = 0
    for start, positions in zip(starts, order, strict=True):
        begins.append(start[:-1].long() + before)
        before += positions.shape[0]
    used = sum(counts)
    packed = torch.cat(
        [*(s.long() for s in slots), *begins, torch.tensor([n], device="cpu"), *(o.long() for o in order),
         table_starts]
    )  # fmt: skip
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    all_slots, all_starts, all_order, table_starts = packed.split(
        [used, used + 1, n, len(counts) + 1]
    )
    of_tables = tuple(o.shape[0] for o in order)
    return with_chunks(all_slots, all_starts, all_order, table_starts, of_tables)


def with_chunks(
    slots: Tensor,
    starts: Tensor,
    order: Tensor,
    table_starts: Tensor,
    table_positions: tuple[int, ...],
) -> TransposedIndex:
    """An index whose arrays lie on the device; `table_positions`: at least as many as are in `order`."""
    return TransposedIndex(
        slots=slots,
        starts=starts,
        order=order,
        table_starts=table_starts,
        chunk_slots=chunk_slots(starts, table_starts, order.shape[0]),
        table_positions=table_positions,
    )


def _empty(table_positions: tuple[int, ...], device: torch.device) -> TransposedIndex:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return TransposedIndex(
        slots=none,
        starts=none.new_zeros(1),
        order=none,
        table_starts=none.new_zeros(len(table_positions) + 1),
        chunk_slots=none,
        table_positions=table_positions,
    )


def variants() -> list[Variant]:
    """Every variant of building an index."""
    return [
        make(dtype)
        for make in (_keys_variant, _heads_variant, _groups_variant, _tables_variant)
        for dtype in (torch.int32, torch.int64)
    ]


_KEY = {torch.int32: "*i32", torch.int64: "*i64"}


@cache
def _keys_variant(dtype: torch.dtype) -> Variant:
    return Variant(
        kernel=keys_kernel,
        types={"lines": "*i64", "keys": _KEY[dtype], "total": "i64"},
        constants={"BLOCK": _BLOCK},
    )


@cache
def _heads_variant(dtype: torch.dtype) -> Variant:
    return Variant(
        kernel=heads_kernel,
        types={"keys": _KEY[dtype], "heads": "*i32", "n": "i64", "total": "i64"},
        constants={"BLOCK": _BLOCK},
    )


@cache
def _groups_variant(dtype: torch.dtype) -> Variant:
    arrays = dict.fromkeys(("ranks", "bounds", "slots", "starts"), "*i64")
    numbers = dict.fromkeys(("n", "total", "tables", "steps"), "i64")
    return Variant(
        kernel=groups_kernel,
        types={"keys": _KEY[dtype], **arrays, **numbers},
        constants={"BLOCK": _BLOCK},
    )


@cache
def _tables_variant(dtype: torch.dtype) -> Variant:
    arrays = dict.fromkeys(("ranks", "bounds", "table_starts"), "*i64")
    numbers = dict.fromkeys(("n", "tables", "steps"), "i64")
    return Variant(
        kernel=tables_kernel,
        types={"keys": _KEY[dtype], **arrays, **numbers},
        constants={"BLOCK": _BLOCK},
    )


# --- Kernels. ---

# The fields of a line of `keys_kernel`.
_COUNT, _SLOTS, _PADDING, _BASE, _TABLE_BASE = map(tl.constexpr, range(5))
_FIELDS = tl.constexpr(5)


@triton.jit(do_not_specialize=["total"])
def keys_kernel(lines, keys, total: tl.int64, BLOCK: tl.constexpr):
    """The key of every position: the first of its table plus its slot, or `total` for padding."""
    line = lines + tl.program_id(1) * _FIELDS
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < tl.load(line + _COUNT)
    slot = tl.load(at64(tl.load(line + _SLOTS)) + at, mask=live, other=-1)
    used = (slot >= 0) & (slot != tl.load(line + _PADDING))
    key = tl.where(used, slot + tl.load(line + _TABLE_BASE), total)
    tl.store(keys + tl.load(line + _BASE) + at, key.to(keys.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["n", "total"])
def heads_kernel(keys, heads, n: tl.int64, total: tl.int64, BLOCK: tl.constexpr):
    """1 where a key of a slot comes for the first time."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < n, other=0)
    before = tl.load(keys + at - 1, mask=(at > 0) & (at < n), other=-1)
    head = (key != before) & (key.to(tl.int64) < total)
    tl.store(heads + at, head.to(tl.int32), mask=at < n)


@triton.jit(do_not_specialize=["n", "total", "tables", "steps"])
def groups_kernel(
    keys,
    ranks,
    bounds,
    slots,
    starts,
    n: tl.int64,
    total: tl.int64,
    tables: tl.int64,
    steps: tl.int64,
    BLOCK: tl.constexpr,
):
    """Writes each slot and where its positions begin, and behind the last one where they end."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    key = tl.load(keys + at, mask=live, other=0).to(tl.int64)
    rank = tl.load(ranks + at, mask=live, other=0)
    before = tl.load(ranks + at - 1, mask=live & (at > 0), other=0)
    head = live & (rank != before)
    table = last_not_above(bounds, 1, tables, tl.where(head, key, 0), steps)
    base = tl.load(bounds + table, mask=head, other=0)
    tl.store(slots + before, key - base, mask=head)
    tl.store(starts + before, at, mask=head)
    after = tl.load(keys + at + 1, mask=at + 1 < n, other=0).to(tl.int64)
    ends = (at + 1 == n) | (after >= total)
    tl.store(starts + rank, at + 1, mask=live & (key < total) & ends)
    tl.store(starts + rank, at, mask=live & (key >= total) & (at == 0))


@triton.jit(do_not_specialize=["n", "tables", "steps"])
def tables_kernel(
    keys,
    ranks,
    bounds,
    table_starts,
    n: tl.int64,
    tables: tl.int64,
    steps: tl.int64,
    BLOCK: tl.constexpr,
):
    """How many slots lie before each table's: those of keys below its first."""
    table = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = table <= tables
    bound = tl.load(bounds + table, mask=live, other=0)
    # The last key below the bound, if the first one is.
    some = live & (bound > tl.load(keys).to(tl.int64))
    at = last_not_above(keys, 1, n, tl.where(some, bound - 1, tl.load(keys).to(tl.int64)), steps)
    tl.store(table_starts + table, tl.load(ranks + at, mask=some, other=0), mask=live)
