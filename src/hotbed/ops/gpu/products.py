"""Products of tiles, for kernels that use tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from hotbed.ops.gpu.variants import interpreted

__all__ = ["INTERPRETED", "product"]

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def product(left, right, sums, PRECISION: tl.constexpr):
    """sums + left @ right, summed in float32."""
    if INTERPRETED:  # where bfloat16 is its bits, and its products are theirs
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision=PRECISION)
