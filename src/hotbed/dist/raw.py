"""Tensors as the bytes that travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["WORD", "Messenger", "exchange", "bytes_of", "numbers_in", "rounded"]

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


class Messenger(Protocol):
    """Sends messages to all ranks; `hotbed.dist.ranks.Ranks` does."""

    rank: int
    size: int

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]: ...
    def send(
        self,
        what: str,
        sizes: Sequence[int],
        fault: BaseException | None = None,
        heard_by: Sequence[int] | None = None,
    ) -> list[Tensor]: ...


def exchange(
    ranks: Messenger, what: str, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]
) -> list[Tensor]:
    """Send pieces, (bytes,) uint8 each, to each rank, this one among them, and receive as `Ranks.send` does.

    Args:
        sizes: bytes that come from each rank.
    """
    messages = ranks.reserve([sum(map(len, pieces)) for pieces in parts])
    for message, pieces in zip(messages, parts, strict=True):
        if pieces:
            torch.cat(list(pieces), out=message)
    return ranks.send(what, sizes)
