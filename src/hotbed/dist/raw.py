"""Tensors as the bytes that travel."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WORD", "bytes_of", "numbers_in", "rounded"]

WORD = 8
"""Bytes of a word. Messages, and what they are made of, begin at multiples of it."""


def rounded(size: int) -> int:
    """Bytes with what fills the last word."""
    return -(-size // WORD) * WORD


def bytes_of(tensor: Tensor) -> Tensor:
    """(bytes,) uint8: the same memory."""
    if not tensor.numel():  # whose strides may be any
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def numbers_in(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers of a dtype; a copy where they do not lie at a multiple of its size."""
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype)
