"""`ColumnWise`: columns cut among ranks.

Shapes: n ids.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hotbed.arrays import integer
from hotbed.errors import PlanError
from hotbed.sharding.kind import Extent, Kept, Shape, Sharding
from hotbed.sharding.named_ranks import distinct_ranks, first_ranks, no_rank, several
from hotbed.text import renamed_argument, warn_renamed

__all__ = ["ColumnWise", "even_widths"]


@renamed_argument("keepers", "owners")
@dataclasses.dataclass(frozen=True, slots=True)
class ColumnWise(Sharding):
    """Several ranks keep some columns of all rows each.

    >>> hb.dist.ColumnWise((0, 3))              # rank 0 keeps the first half of the columns
    >>> hb.dist.ColumnWise((3, 0), (48, 16))    # rank 3 keeps columns 0 to 47, rank 0 columns 48 to 63

    Raises:
        PlanError: a rank comes twice; widths that fit no columns.
    """

    owners: tuple[int, ...] | None = None
    """Ranks, in the order of their columns. None: whichever the plan chooses."""

    widths: tuple[int, ...] | None = None
    """Columns of each owner. None: as many each, one more for the first where they do not divide."""

    name: ClassVar[str] = "column"

    @classmethod
    def candidates(cls, table: Shape, ranks: Sequence[int]) -> Sequence[Sharding]:
        counts, count = [], 2
        while count < len(ranks):
            counts.append(count)
            count *= 2
        counts.append(len(ranks))
        wanted = [tuple(sorted(ranks[:n])) for n in counts if 1 < n <= table.dim]
        return [_even_columns(owners, table.dim) for owners in wanted]

    def __post_init__(self) -> None:
        if self.owners is None:
            if self.widths is not None:
                raise PlanError(f"ColumnWise: widths={self.widths!r} need owners, a rank for each.")
            return
        owners = distinct_ranks(
            self, self.owners, "; where one keeps several slices, add their widths up"
        )
        object.__setattr__(self, "owners", owners)
        if self.widths is not None:
            given = several(self, "widths", self.widths)
            widths = [integer(width) for width in given]
            if len(widths) != len(owners) or any(width is None or width < 1 for width in widths):
                raise PlanError(
                    f"ColumnWise: widths={self.widths!r} must be {len(owners)} positive numbers, one "
                    "for each owner."
                )
            object.__setattr__(self, "widths", tuple(widths))

    @property
    def keepers(self) -> tuple[int, ...] | None:
        """Earlier name of `owners`."""
        warn_renamed("keepers", "owners")
        return self.owners

    @property
    def placed(self) -> bool:
        return self.owners is not None

    def on(self, ranks: Sequence[int]) -> Sharding:
        if self.owners is None:
            return self
        return ColumnWise(tuple(ranks[owner] for owner in self.owners), self.widths)

    def slices(self, table: Shape, wanted: int, world_size: int) -> int:
        return wanted if wanted > 1 else min(world_size, table.dim)

    def settled(self, table: Shape) -> Sharding:
        return self if self.widths is not None else ColumnWise(self.owners, self._widths(table))

    def fault(self, table: Shape, world_size: int) -> str:
        for owner in self.owners or (-1,):
            if fault := no_rank(owner, world_size):
                return fault
        owners = len(self.owners or ())
        if owners > table.dim:
            return f"{owners} ranks are to keep columns, and it has {table.dim}"
        if self.widths is not None and sum(self.widths) != table.dim:
            return f"widths {self.widths} have {sum(self.widths)} columns, and it has {table.dim}"
        return ""

    def extents(self, table: Shape, rows: int, world_size: int) -> list[Extent]:
        begins = self._begins(table)
        return [
            Extent(range(owner, owner + 1), rows, end - begin)
            for owner, begin, end in zip(self._ranks(), begins, begins[1:], strict=False)
        ]

    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        if rank not in self._ranks():
            return None
        at, begins = self._ranks().index(rank), self._begins(table)
        return Kept(begins[at], begins[at + 1])

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        at = bisect.bisect_right(self._begins(table), column) - 1
        return torch.full_like(ids, self._ranks()[at])

    def described(self, table: Shape) -> tuple[str, str]:
        return "column", first_ranks(self._ranks())

    def _ranks(self) -> tuple[int, ...]:
        assert self.owners is not None
        return self.owners

    def _begins(self, table: Shape) -> list[int]:
        """The first column of each owner, and the number of columns."""
        return [0, *itertools.accumulate(self._widths(table))]

    def _widths(self, table: Shape) -> tuple[int, ...]:
        return self.widths or even_widths(table.dim, len(self._ranks()))


@functools.lru_cache(maxsize=4096)
def _even_columns(owners: tuple[int, ...], dim: int) -> ColumnWise:
    """Return the kind that gives each owner as many of `dim` columns; kept, as checks of many owners take
    long."""
    return ColumnWise(owners, even_widths(dim, len(owners)))


def even_widths(dim: int, slices: int) -> tuple[int, ...]:
    """`dim` columns in so many slices; the first are one wider where they do not divide."""
    each, more = divmod(dim, slices)
    return (each + 1,) * more + (each,) * (slices - more)
