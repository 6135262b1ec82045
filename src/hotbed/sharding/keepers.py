"""Which rank keeps an id, as a function of the id alone.

Shapes: n ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from hotbed import _core

__all__ = ["Owned", "hashed_keeper", "modulo_keeper"]


def hashed_keeper(ids: Tensor, world_size: int) -> Tensor:
    """(n,) int64: the rank that keeps each of (n,) int64 ids of a dynamic table.

    ``((h >> 32) * world_size) >> 32``, h being the finalizer of MurmurHash3 (Appleby, public domain) of
    the id's 64 bits, unsigned.
    """
    return _kept(ids, world_size, _core.Dealing.hash)


def modulo_keeper(ids: Tensor, world_size: int) -> Tensor:
    """(n,) int64: ``id % world_size``, from 0 on for negative ids, too."""
    return _kept(ids, world_size, _core.Dealing.modulo)


def _kept(ids: Tensor, world_size: int, dealing: _core.Dealing) -> Tensor:
    here = ids.to("cpu", torch.int64).contiguous()
    keepers = torch.empty_like(here)
    _core.find_keepers(here.data_ptr(), here.numel(), world_size, dealing, keepers.data_ptr())
    return keepers.to(ids.device)


@dataclasses.dataclass(frozen=True, slots=True)
class Owned:
    """Whether ids are a rank's; a value, so that parts can be compared and pickled."""

    keeper: Callable[[Tensor, int], Tensor]
    rank: int
    world_size: int

    def __call__(self, ids: Tensor) -> Tensor:
        return self.keeper(ids, self.world_size) == self.rank
