"""Tensors as the bytes that travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["bytes_of", "numbers_in"]


def bytes_of(tensor: Tensor) -> Tensor:
    """(bytes,) uint8: the same memory."""
    if not tensor.numel():  # whose strides may be any
        return torch.empty(0, dtype=torch.uint8)
    flat: Any = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8)  # type: ignore[no-any-return]


def numbers_in(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers of a dtype; a copy where they do not lie at a multiple of its size."""
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype)
