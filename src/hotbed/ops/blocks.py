"""Large tensors from the core's pool: memory that was touched before costs no page faults.

The page faults of a fresh large buffer cost more than writing it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotbed import _core
from hotbed.tables import CORE_DTYPES

__all__ = ["empty"]

_WORTH_POOLING = 1 << 20  # bytes; malloc keeps smaller blocks itself


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """A contiguous tensor of `shape` with undefined contents, dtype and device those of `like`."""
    elements = 1
    for extent in shape:
        elements *= extent
    if (
        like.device.type != "cpu"
        or like.dtype not in CORE_DTYPES
        or elements * like.itemsize < _WORTH_POOLING
    ):
        return like.new_empty(shape)
    return _core.empty(list(shape), CORE_DTYPES[like.dtype])  # type: ignore[no-any-return]
