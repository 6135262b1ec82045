"""The kinds: replicated, by table, by row, by column.

Shapes: n ids.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from hotbed import _core
from hotbed.arrays import integer
from hotbed.errors import PlanError
from hotbed.sharding.kind import Extent, Kept, Shape, Sharding
from hotbed.sharding.named_ranks import (
    checked_rank,
    distinct_ranks,
    first_ranks,
    no_rank,
    several,
)
from hotbed.sharding.owners import Owned, hashed_owner, modulo_owner
from hotbed.text import warn_renamed

__all__ = [
    "KINDS",
    "ColumnWise",
    "Replicated",
    "RowWise",
    "TableWise",
    "even_widths",
    "sharding_of",
]

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


T = TypeVar("T")


def _renamed_argument(old: str, new: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a class that takes an argument by its earlier name, too, and warns."""

    def taking_both(kind: type[T]) -> type[T]:
        made = kind.__init__

        @functools.wraps(made)
        def init(self: T, *args: object, **options: object) -> None:
            if old in options:
                warn_renamed(old, new)
                options[new] = options.pop(old)
            made(self, *args, **options)

        setattr(kind, "__init__", init)  # noqa: B010
        return kind

    return taking_both


@_renamed_argument("keeper", "owner")
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
    """Ranks that keep rows, rising. None: all."""

    name: ClassVar[str] = "row"

    @classmethod
    def candidates(cls, table: Shape, ranks: Sequence[int]) -> Sequence[Sharding]:
        return (cls(),) if table.rows is None or table.rows >= len(ranks) else ()

    def __post_init__(self) -> None:
        if self.owners is not None:
            owners = sorted(distinct_ranks(self, self.owners))
            object.__setattr__(self, "owners", tuple(owners))
        if self.placement not in (None, "hash", "modulo"):
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
        if self.owners is not None and (fault := no_rank(self.owners[-1], world_size)):
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


@_renamed_argument("keepers", "owners")
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


KINDS: dict[str, type[Sharding]] = {
    kind.name: kind for kind in (Replicated, TableWise, RowWise, ColumnWise)
}


def sharding_of(given: object) -> Sharding:
    """A kind, or what its name is short for.

    Raises:
        PlanError: it is neither.
    """
    if isinstance(given, Sharding):
        return given
    if isinstance(given, str) and given in KINDS:
        return KINDS[given]()
    names = ", ".join(repr(name) for name in KINDS)
    raise PlanError(f"A sharding is a kind of hotbed.dist or one of {names}, not {given!r}.")


def even_widths(dim: int, slices: int) -> tuple[int, ...]:
    """`dim` columns in so many slices; the first are one wider where they do not divide."""
    each, more = divmod(dim, slices)
    return (each + 1,) * more + (each,) * (slices - more)
