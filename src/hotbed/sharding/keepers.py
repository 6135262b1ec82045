"""Which rank keeps an id, as a function of the id alone.

Shapes: n ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Owned", "hashed_keeper", "modulo_keeper"]


def hashed_keeper(ids: Tensor, world_size: int) -> Tensor:
    """(n,) int64: the rank that keeps each of (n,) int64 ids of a dynamic table.

    ``((h >> 32) * world_size) >> 32``, h being the finalizer of MurmurHash3 (Appleby, public domain) of
    the id's 64 bits, unsigned. An index hashes ids by another function, or else all ids of a rank would
    share leading bits there.
    """
    bits = ids
    for factor in (
        -0xAE502812AA7333,
        -0x3B314601E57A13AD,
    ):  # 0xff51afd7ed558ccd, 0xc4ceb9fe1a85ec53
        bits = (bits ^ _shifted(bits, 33)) * factor  # wraps around, as unsigned numbers do
    bits = bits ^ _shifted(bits, 33)
    return (_shifted(bits, 32) * world_size) >> 32


def modulo_keeper(ids: Tensor, world_size: int) -> Tensor:
    """(n,) int64: ``id % world_size``, from 0 on for negative ids, too."""
    return torch.remainder(ids, world_size)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Owned:
    """Whether ids are a rank's; a value, so that parts can be compared and pickled."""

    keeper: Callable[[Tensor, int], Tensor]
    rank: int
    world_size: int

    def __call__(self, ids: Tensor) -> Tensor:
        return self.keeper(ids, self.world_size) == self.rank
