"""Stochastic rounding of rows, with the bits of the core (csrc/base/random.hpp, csrc/kernels/codec.hpp).

The random bits of a value are a pure function of table key, id, column and step, so the same row
gets the same bits on every card and on the CPU. These are functions for kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hotbed.ops.gpu.codec import half_bits

__all__ = ["column_bits", "row_stream", "stochastic_bits"]

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(x):
    """The finalizer of SplitMix64, of uint64."""
    x ^= x >> 30
    x *= _FIRST_FACTOR
    x ^= x >> 27
    x *= _SECOND_FACTOR
    x ^= x >> 31
    return x


@triton.jit
def row_stream(key, ids, step):
    """The stream (BLOCK,) uint64 of the rows of `ids` at a step; all three are int64."""
    purpose = mix((step + 1).to(tl.uint64, bitcast=True) + _GOLDEN)
    rank = (ids + 1).to(tl.uint64, bitcast=True)
    row = mix(key.to(tl.uint64, bitcast=True) + rank * _GOLDEN)
    return mix(row ^ purpose)


@triton.jit
def column_bits(stream, column, VECTOR: tl.constexpr):
    """The 32 random bits (BLOCK, VECTOR) of the values of vectors `column` (BLOCK,)."""
    first = (column * VECTOR).to(tl.uint64, bitcast=True)[:, None]
    number = first + tl.arange(1, VECTOR + 1)[None, :].to(tl.uint64)
    return mix(stream[:, None] + number * _GOLDEN).to(tl.uint32)


@triton.jit
def stochastic_bits(values, random, kind):
    """float32 → the bits of float16 (kind 2) or bfloat16 (kind 3), as int16.

    Rounds up with the probability of the part that is cut off. What overflows becomes the largest
    finite value; NaN and infinity stay.
    """
    bits = values.to(tl.uint32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    special = rest >= 0x7F800000

    brain = bits + (random & 0xFFFF)
    over = (brain & 0x7FFFFFFF) >= 0x7F800000
    brain = tl.where(over, (bits & 0x80000000) | 0x7F7F0000, brain) >> 16
    brain = tl.where(special, half_bits(values, True).to(tl.uint16, bitcast=True), brain)

    sign = (bits >> 16) & 0x8000
    exponent = rest >> 23
    mantissa = (rest & 0x7FFFFF) | 0x800000
    # From 2^-14 on: 13 bits are cut off.
    normal = rest - 0x38000000 + (random & 0x1FFF)
    normal = tl.where(normal >= 0x0F800000, 0x0F7FE000, normal) >> 13
    # Subnormal in half: one unit is 2^-24.
    shift = tl.where((exponent >= 103) & (exponent <= 112), 126 - exponent, 14).to(tl.uint32)
    one = shift * 0 + 1
    subnormal = (mantissa + (random & ((one << shift) - 1))) >> shift
    # Below one unit: up with probability x / 2^-24, in units of 2^-32.
    left = tl.where(exponent >= 94, exponent - 94, 0) & 31
    right = tl.where(exponent < 94, 94 - exponent, 0)
    share = tl.where(exponent >= 94, mantissa << left, mantissa >> (right & 31))
    share = tl.where(right >= 24, 0, share)
    tiny = (random < share).to(tl.uint32)
    half = tl.where(rest < 0x33800000, tiny, subnormal)
    half = sign | tl.where(rest < 0x38800000, half, normal)
    finite = tl.where(special & (kind == 2), values, 0.0)
    half = tl.where(special, half_bits(finite, False).to(tl.uint16, bitcast=True), half)
    return tl.where(kind == 3, brain, half).to(tl.uint16).to(tl.int16, bitcast=True)
