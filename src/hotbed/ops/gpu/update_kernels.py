"""The kernels of `update`: columns of rows, and what row rules keep once a row."""

from __future__ import annotations

import triton
import triton.language as tl

from hotbed.ops.gpu.reduce import sum_terms
from hotbed.ops.gpu.rounding import column_bits, row_stream, stochastic_bits
from hotbed.ops.gpu.rows import (
    at32,
    at64,
    load_values,
    only_if,
    read_values,
    spread,
    store_bits,
    store_values,
    width_of,
)
from hotbed.ops.gpu.rules import NUMBERS, apply_rule, row_rate, shrunk_gradient, single

__all__ = ["row_rates_kernel", "update_kernel"]

# The fields of a line, in the order of `update._line`.
_VECTORS, _MULTIPLIER, _WEIGHTS, _KIND = map(tl.constexpr, range(4))
_STATES, _ROW_STATES = tl.constexpr(4), tl.constexpr(7)
_SLOTS, _BOUNDS, _GRADS, _RATES, _APPLY, _IDS, _LAST_STEP, _KEY, _STEP, _NUMBERS = map(
    tl.constexpr, range(9, 19)
)
_FIELDS = tl.constexpr(19 + NUMBERS - 1)


@triton.jit
def allowed(line):
    """Whether the step is to be taken."""
    apply = tl.load(line + _APPLY)
    flag = tl.load(apply.to(tl.pointer_type(tl.int32)), mask=apply != 0, other=1)
    return flag != 0


@triton.jit
def load_state(line, k, at, live, VECTOR: tl.constexpr):
    return load_values(tl.load(line + _STATES + k) + at, 0, live, 4, VECTOR)


@triton.jit
def store_state(line, k, at, values, live, VECTOR: tl.constexpr):
    store_values(tl.load(line + _STATES + k) + at, values, 0, live, 4, VECTOR)


@triton.jit
def update_kernel(
    lines,
    header,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    RATED: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Every column of the rows of a batch: gradient, rule, write-back."""
    line = lines + tl.program_id(1) * _FIELDS
    numbers = line + _NUMBERS
    vectors, multiplier = tl.load(line + _VECTORS), tl.load(line + _MULTIPLIER)
    bounds = at64(tl.load(line + _BOUNDS))
    first = tl.load(bounds)
    count = tl.load(bounds + 1) - first
    grads = tl.load(line + _GRADS)
    kind = tl.load(line + _KIND)
    blocks = tl.where(allowed(line), (count * vectors + BLOCK - 1) // BLOCK, 0)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row, column = spread(block, vectors, multiplier, BLOCK)
        live = row < count
        slot = tl.load(at64(tl.load(line + _SLOTS)) + first + row, mask=live, other=0)
        place = slot * vectors + column
        address = tl.load(line + _WEIGHTS) + place * (VECTOR * width_of(kind, WIDTH))
        w = load_values(address, kind, live, WIDTH, VECTOR)
        a, b, c = w, w, w
        at = place * (VECTOR * 4)
        if STATES > 0:
            a = load_state(line, 0, at, live, VECTOR)
        if STATES > 1:
            b = load_state(line, 1, at, live, VECTOR)
        if STATES > 2:
            c = load_state(line, 2, at, live, VECTOR)
        given = grads + (row * vectors + column) * (VECTOR * 4)
        g = load_values(given, 0, only_if(grads != 0, live), 4, VECTOR)
        rate = g
        if RATED:
            rates = tl.load(at32(tl.load(line + _RATES)) + row, mask=live, other=0.0)
            rate = tl.broadcast_to(rates[:, None], [BLOCK, VECTOR])
        else:
            summed = only_if(grads == 0, live)
            g += sum_terms(header, first + row, column, summed, VECTOR, BLOCK, UNROLL)
        w, a, b, c = apply_rule(w, g, a, b, c, rate, numbers, RULE)
        if STATES > 0:
            store_state(line, 0, at, a, live, VECTOR)
        if STATES > 1:
            store_state(line, 1, at, b, live, VECTOR)
        if STATES > 2:
            store_state(line, 2, at, c, live, VECTOR)
        if WIDTH != 2:
            full = live if WIDTH == 4 else only_if(kind == 0, live)
            store_values(address, w, kind, full, 4, VECTOR)
        if WIDTH != 4:
            ids = tl.load(line + _IDS)
            id = tl.load(at64(ids) + slot, mask=only_if(ids != 0, live), other=0)
            id = tl.where(ids != 0, id, slot)
            stream = row_stream(tl.load(line + _KEY), id, tl.load(line + _STEP))
            bits = stochastic_bits(w, column_bits(stream, column, VECTOR), kind)
            store_bits(address, bits, kind, live, VECTOR)
        last_step = tl.load(line + _LAST_STEP)
        once = only_if(last_step != 0, live & (column == 0))
        tl.store(at64(last_step) + slot, tl.load(line + _STEP), mask=once)


@triton.jit
def row_rates_kernel(
    lines,
    RULE: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Moves the states of one value a row, and finds the rate of each row.

    Columns are added as the core adds them: sixteen running sums, then those in pairs.
    """
    line = lines + tl.program_id(1) * _FIELDS
    numbers = line + _NUMBERS
    vectors = tl.load(line + _VECTORS)
    dim = vectors * VECTOR
    bounds = at64(tl.load(line + _BOUNDS))
    first = tl.load(bounds)
    count = tl.load(bounds + 1) - first
    kind = tl.load(line + _KIND)
    decays = single(numbers, 1) != 0
    blocks = tl.where(allowed(line), (count + ROWS - 1) // ROWS, 0)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        live = row < count
        slot = tl.load(at64(tl.load(line + _SLOTS)) + first + row, mask=live, other=0)
        grad_rows = tl.load(line + _GRADS) + row * vectors * (VECTOR * 4)
        weight_rows = tl.load(line + _WEIGHTS) + slot * dim * width_of(kind, WIDTH)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, dim, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = live[:, None] & (column < dim)[None, :]
            g = read_values(grad_rows, column, 0, inside, 4, VECTOR)
            w = read_values(weight_rows, column, kind, only_if(decays, inside), WIDTH, VECTOR)
            g = shrunk_gradient(w, g, numbers)
            sums += g * g
        half = tl.sum(tl.reshape(sums, [ROWS, 2, 8]), 1)
        half = tl.sum(tl.reshape(half, [ROWS, 2, 4]), 1)
        half = tl.sum(tl.reshape(half, [ROWS, 2, 2]), 1)
        total = tl.sum(half, 1)
        mean = tl.div_rn(total, tl.zeros([ROWS], tl.float32) + dim.to(tl.float32))
        rate = row_rate(mean, line + _ROW_STATES, slot, live, numbers, ROWS, RULE)
        tl.store(at32(tl.load(line + _RATES)) + row, rate, mask=live)
