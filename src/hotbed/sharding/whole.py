"""`Replicated` and `TableWise`: ranks that keep whole tables.

Shapes: n ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hotbed.sharding.kind import Extent, Kept, Shape, Sharding
from hotbed.sharding.named_ranks import checked_rank, no_rank
from hotbed.text import renamed_argument, warn_renamed

__all__ = ["Replicated", "TableWise"]

_CANDIDATE_RANKS = 4
"""Ranks among which a plan by costs looks for one to keep a whole table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated(Sharding):
    """Every rank keeps the whole table, and gradients are summed over all ranks."""

    name: ClassVar[str] = "replicated"
    replicated: ClassVar[bool] = True

    @classmethod
    def candidates(cls, table: Shape, ranks: Sequence[int]) -> Sequence[Sharding]:
        return (cls(),) if table.rows is not None else ()

    def fault(self, table: Shape, world_size: int) -> str:
        return ""

    def extents(self, table: Shape, rows: int, world_size: int) -> list[Extent]:
        return [Extent(range(world_size), rows, table.dim)]

    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        return Kept(0, table.dim)

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        return torch.full_like(ids, requester)

    def described(self, table: Shape) -> tuple[str, str]:
        return "replicated", "all"


@renamed_argument("keeper", "owner")
@dataclasses.dataclass(frozen=True, slots=True)
class TableWise(Sharding):
    """One rank keeps the whole table.

    Raises:
        PlanError: `owner` is no rank.
    """

    owner: int | None = None
    """Rank that keeps the table. None: whichever the plan chooses."""

    name: ClassVar[str] = "table"

    @classmethod
    def candidates(cls, table: Shape, ranks: Sequence[int]) -> Sequence[Sharding]:
        return tuple(cls(rank) for rank in ranks[:_CANDIDATE_RANKS])

    def __post_init__(self) -> None:
        if self.owner is not None:
            object.__setattr__(self, "owner", checked_rank(self, self.owner))

    @property
    def keeper(self) -> int | None:
        """Earlier name of `owner`."""
        warn_renamed("keeper", "owner")
        return self.owner

    @property
    def placed(self) -> bool:
        return self.owner is not None

    def on(self, ranks: Sequence[int]) -> Sharding:
        return self if self.owner is None else TableWise(ranks[self.owner])

    def fault(self, table: Shape, world_size: int) -> str:
        return no_rank(-1 if self.owner is None else self.owner, world_size)

    def extents(self, table: Shape, rows: int, world_size: int) -> list[Extent]:
        assert self.owner is not None
        return [Extent(range(self.owner, self.owner + 1), rows, table.dim)]

    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        return Kept(0, table.dim) if rank == self.owner else None

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        assert self.owner is not None
        return torch.full_like(ids, self.owner)

    def described(self, table: Shape) -> tuple[str, str]:
        return "table", str(self.owner)
