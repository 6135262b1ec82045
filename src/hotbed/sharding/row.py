"""`RowWise`: rows cut among ranks.

Shapes: n ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hotbed import _core
from hotbed.arrays import is_one_of
from hotbed.errors import PlanError
from hotbed.sharding.kind import Extent, Kept, Shape, Sharding
from hotbed.sharding.named_ranks import distinct_ranks, first_ranks, no_rank
from hotbed.sharding.owners import Owned, hashed_owner, modulo_owner

__all__ = ["RowWise"]


@dataclasses.dataclass(frozen=True, slots=True)
class RowWise(Sharding):
    """Every rank, or each of some, keeps some rows.

    The r-th of n ranks keeps the ids of a static table with ``id % n == r``, as its own rows ``id // n``; of
    a dynamic table the ids that `hashed_owner` gives it.

    Raises:
        PlanError: there is no such placement; a rank comes twice.
    """

    placement: str | None = None
    """``"modulo"`` places a dynamic table by ``id % n``, never negative, too, as SparseOperationKit
    does: ids that share a factor with n then crowd on few ranks. ``"hash"`` or None: by hash."""

    owners: tuple[int, ...] | None = None
    """Ranks that keep rows, the r-th of n at the r-th place. None: all, in their order."""

    name: ClassVar[str] = "row"

    @classmethod
    def candidates(cls, table: Shape, ranks: Sequence[int]) -> Sequence[Sharding]:
        return (cls(),) if table.rows is None or table.rows >= len(ranks) else ()

    def __post_init__(self) -> None:
        if self.owners is not None:
            object.__setattr__(self, "owners", distinct_ranks(self, self.owners))
        if not is_one_of(self.placement, (None, "hash", "modulo")):
            raise PlanError(
                f'RowWise: placement must be "hash", "modulo" or None, not {self.placement!r}.'
            )

    def on(self, ranks: Sequence[int]) -> Sharding:
        at = range(len(ranks)) if self.owners is None else self.owners
        return RowWise(self.placement, tuple(ranks[owner] for owner in at))

    def settled(self, table: Shape) -> Sharding:
        placement = "hash" if self._owner(table) is hashed_owner else "modulo"
        return RowWise(placement, self.owners)

    def fault(self, table: Shape, world_size: int) -> str:
        if self.owners is not None and (fault := no_rank(max(self.owners), world_size)):
            return fault
        if self.placement == "hash" and table.rows is not None:
            return "RowWise('hash') is for dynamic tables; leave the placement of a static one out"
        return ""

    def extents(self, table: Shape, rows: int, world_size: int) -> list[Extent]:
        if self.owners is not None:
            each, more = divmod(rows, len(self.owners))
            return [
                Extent(range(owner, owner + 1), each + (at < more), table.dim)
                for at, owner in enumerate(self.owners)
            ]
        each, more = divmod(rows, world_size)
        return [
            Extent(range(more), each + 1, table.dim),
            Extent(range(more, world_size), each, table.dim),
        ]

    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        if self.owners is not None:
            if rank not in self.owners:
                return None
            rank, world_size = self.owners.index(rank), len(self.owners)
        if table.rows is not None:
            return Kept(0, table.dim, rank, world_size)
        return Kept(0, table.dim, owns=Owned(self._owner(table), rank, world_size))

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        if self.owners is None:
            return self._owner(table)(ids, world_size)
        at = self._owner(table)(ids, len(self.owners))
        return torch.tensor(self.owners, dtype=torch.int64, device=at.device)[at]

    def in_order(self, world_size: int) -> Sequence[int]:
        return range(world_size) if self.owners is None else self.owners

    def owner_rule(self, table: Shape) -> _core.OwnerRule | None:
        hashed = self._owner(table) is hashed_owner
        return _core.OwnerRule.hash if hashed else _core.OwnerRule.modulo

    def _owner(self, table: Shape) -> Callable[[Tensor, int], Tensor]:
        hashed = table.rows is None and self.placement != "modulo"
        return hashed_owner if hashed else modulo_owner

    def described(self, table: Shape) -> tuple[str, str]:
        whose = "all" if self.owners is None else first_ranks(self.owners)
        how = "hash" if self._owner(table) is hashed_owner else "id % n"
        return "row", f"{whose}, {how}"
