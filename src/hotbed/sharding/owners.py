"""Which rank keeps an id, as a function of the id alone.

Shapes: n ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from hotbed import _core
from hotbed.arrays import id_tensor, integer
from hotbed.errors import PlanError

__all__ = [
    "MOST_RANKS",
    "Owned",
    "checked_local_size",
    "checked_world_size",
    "hashed_owner",
    "modulo_owner",
]

MOST_RANKS = 1 << 20


def hashed_owner(ids: object, world_size: int) -> Tensor:
    """Return (n,) int64: the rank that keeps each of (n,) ids of a dynamic table.

    ``((h >> 32) * world_size) >> 32``, h being the finalizer of MurmurHash3 (Appleby, public domain) of
    the id's 64 bits, unsigned.

    Raises:
        InputError: no ids.
        PlanError: no number of ranks.
    """
    return _kept(ids, world_size, _core.OwnerRule.hash)


def modulo_owner(ids: object, world_size: int) -> Tensor:
    """Return (n,) int64: ``id % world_size``, never negative. Arguments as of `hashed_owner`."""
    return _kept(ids, world_size, _core.OwnerRule.modulo)


def checked_world_size(given: object) -> int:
    """Raises PlanError where it is no number of ranks."""
    ranks = integer(given)
    if ranks is None or not 0 < ranks <= MOST_RANKS:
        raise PlanError(f"world_size must be a number from 1 to {MOST_RANKS:,}, not {given!r}.")
    return ranks


def checked_local_size(given: object) -> int | None:
    """Raises PlanError where it is neither None nor a number of ranks."""
    ranks = integer(given)
    if given is not None and (ranks is None or not 0 < ranks <= MOST_RANKS):
        raise PlanError(f"local_world_size is the number of ranks on a machine, not {given!r}.")
    return ranks


def _kept(ids: object, world_size: object, owner_rule: _core.OwnerRule) -> Tensor:
    ranks = checked_world_size(world_size)
    given = id_tensor("An owner", ids)
    here = given.to("cpu", torch.int64).contiguous()
    owners = torch.empty_like(here)
    _core.find_owners(here.data_ptr(), here.numel(), ranks, owner_rule, owners.data_ptr())
    return owners.to(given.device)


@dataclasses.dataclass(frozen=True, slots=True)
class Owned:
    """Whether ids are a rank's; a value, so that parts can be compared and pickled."""

    owner: Callable[[Tensor, int], Tensor]
    rank: int
    world_size: int

    def __call__(self, ids: Tensor) -> Tensor:
        return self.owner(ids, self.world_size) == self.rank
