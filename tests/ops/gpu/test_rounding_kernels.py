"""Stochastic rounding in kernels: the bits of the core, word for word."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from devices import DEVICE

from hotbed import _core
from hotbed.ops.gpu.rounding import column_bits, row_stream, stochastic_bits

KINDS = {torch.float16: 2, torch.bfloat16: 3}
MASK = 2**64 - 1


@triton.jit
def rounds(values, words, out, kind, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    random = tl.load(words + at).to(tl.uint32, bitcast=True)
    tl.store(out + at, stochastic_bits(tl.load(values + at), random, kind))


@triton.jit
def draws(keys, ids, steps, out, N: tl.constexpr, VECTOR: tl.constexpr):
    at = tl.arange(0, N)
    stream = row_stream(tl.load(keys), tl.load(ids + at), tl.load(steps))
    bits = column_bits(stream, at.to(tl.int64), VECTOR)
    places = at[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    tl.store(out + places, bits.to(tl.int32, bitcast=True))


def mix(x):
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def word(key, id, step, column):
    """By the definition in docs: a stream a row, a word a column."""
    golden = 0x9E3779B97F4A7C15
    stream = mix((key + golden * (id + 1)) & MASK)
    stream = mix(stream ^ mix((step + 1 + golden) & MASK))
    return mix((stream + golden * (column + 1)) & MASK) & 0xFFFFFFFF


@pytest.mark.parametrize("vector", [1, 4])
@pytest.mark.parametrize("key", [0, 7, 2**64 - 3])
def test_words_are_drawn_as_the_core_draws_them(key, vector):
    ids = torch.randint(-(2**62), 2**62, (16,))
    out = torch.empty(16, vector, dtype=torch.int32, device=DEVICE)
    keys = torch.tensor([key if key < 2**63 else key - 2**64], device=DEVICE)
    draws[(1,)](keys, ids.to(DEVICE), torch.tensor([41], device=DEVICE), out, 16, vector)
    expected = [
        [word(key, i, 41, row * vector + j) for j in range(vector)]
        for row, i in enumerate(ids.tolist())
    ]
    assert (out.cpu().long() & 0xFFFFFFFF).tolist() == expected


@pytest.mark.filterwarnings("ignore:.*FP fusion.*")
@pytest.mark.parametrize("dtype", KINDS)
def test_values_are_rounded_as_the_core_rounds_them(dtype):
    """Random bits of every exponent, the edges of every range, and words at their edges."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 60_000, dtype=np.uint32)
    small = rng.integers(0x30000000, 0x40000000, 40_000, dtype=np.uint32)  # subnormal in half
    edges = np.array(
        [e + d & 0xFFFFFFFF for e in (0x33800000, 0x38800000, 0x47800000, 0x7F800000, 0x477FE000,
         0x7F7F0000, 0x27800000, 0x2F000000, 0) for d in (-1, 0, 1)] * 400, dtype=np.uint32
    )  # fmt: skip
    edges[::2] |= np.uint32(0x80000000)
    everything = np.concatenate([bits, small, edges])
    words = rng.integers(0, 2**32, len(everything), dtype=np.uint32)
    words[-len(edges) :: 3] = 0xFFFFFFFF
    words[-len(edges) + 1 :: 3] = 0
    count = len(everything) // 4096 * 4096
    values = torch.from_numpy(everything[-count:].view(np.float32).copy())
    random = torch.from_numpy(words[-count:].view(np.int32).copy())
    expected = torch.empty(count, dtype=dtype)
    _core.encode_values_stochastic(
        KINDS[dtype], values.data_ptr(), random.data_ptr(), count, expected.data_ptr()
    )
    out = torch.empty(count, dtype=torch.int16, device=DEVICE)
    rounds[(count // 4096,)](values.to(DEVICE), random.to(DEVICE), out, KINDS[dtype], 4096)
    assert torch.equal(out.cpu(), expected.view(torch.int16))
