"""`GridWise`: rows cut among groups of ranks, columns inside each.

Shapes: n ids.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hotbed import _core
from hotbed.sharding.column import ColumnWise, even_widths
from hotbed.sharding.kind import Extent, Kept, Shape, Sharding
from hotbed.sharding.named_ranks import distinct_ranks, first_ranks, no_rank, several
from hotbed.sharding.row import RowWise

__all__ = ["GridWise"]


@dataclasses.dataclass(frozen=True, slots=True)
class GridWise(Sharding):
    """Groups of ranks, such as those of one machine, keep some rows each; of these, each rank of a group
    keeps some columns.

    >>> hb.dist.GridWise(((0, 1), (2, 3)))      # ranks 0 and 1 keep even ids, half of the columns each

    Rows are cut among the groups as `RowWise` cuts them among ranks. A pooled bag then is one vector from
    each other machine, and not one from each rank there.

    Raises:
        PlanError: there is no such placement; a rank comes twice.
    """

    groups: tuple[tuple[int, ...], ...] | None = None
    """Ranks of each group, in the order of their columns; groups in the order of their rows. None: those of
    each machine, as the plan knows them."""

    placement: str | None = None
    """As of `RowWise`."""

    name: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        self._by_row()
        if self.groups is None:
            return
        given = [distinct_ranks(self, group) for group in several(self, "groups", self.groups)]
        distinct_ranks(self, tuple(itertools.chain(*given)), " over all groups")
        object.__setattr__(self, "groups", tuple(given))

    @classmethod
    def of_machines(cls, world_size: int, local_world_size: int) -> GridWise:
        """Return the kind with the ranks of each machine as a group."""
        begins = range(0, world_size, local_world_size)
        return cls(tuple(tuple(range(begin, begin + local_world_size)) for begin in begins))

    @property
    def placed(self) -> bool:
        return self.groups is not None

    def on(self, ranks: Sequence[int]) -> Sharding:
        if self.groups is None:
            return self
        moved = tuple(tuple(ranks[rank] for rank in group) for group in self.groups)
        return GridWise(moved, self.placement)

    def settled(self, table: Shape) -> Sharding:
        by_row = self._by_row().settled(table)
        assert isinstance(by_row, RowWise)
        return GridWise(self.groups, by_row.placement)

    def fault(self, table: Shape, world_size: int) -> str:
        if self.groups is None:
            return "no groups of ranks are named to keep it, and the plan has no local_world_size"
        for group in self.groups:
            if fault := no_rank(max(group), world_size):
                return fault
            if len(group) > table.dim:
                return f"{len(group)} ranks are to keep columns, and it has {table.dim}"
        return self._by_row().fault(table, len(self.groups))

    def extents(self, table: Shape, rows: int, world_size: int) -> list[Extent]:
        found, groups = [], self._groups()
        for of_rows in self._by_row().extents(table, rows, len(groups)):
            for at in of_rows.ranks:
                widths = even_widths(table.dim, len(groups[at]))
                for rank, width in zip(groups[at], widths, strict=True):
                    found.append(Extent(range(rank, rank + 1), of_rows.rows, width))
        return found

    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        groups = self._groups()
        for at, group in enumerate(groups):
            if rank in group:
                columns = ColumnWise(group).kept(table, rank, world_size)
                of_rows = self._by_row().kept(table, at, len(groups))
                assert columns is not None and of_rows is not None
                return of_rows._replace(begin=columns.begin, end=columns.end)
        return None

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        groups = self._groups()
        at = self._by_row().owner_of(table, ids, len(groups))
        asked = torch.empty_like(ids)
        for number, group in enumerate(groups):
            here = at == number
            asked[here] = ColumnWise(group).owner_of(table, ids[here], world_size, column)
        return asked

    def in_order(self, world_size: int) -> Sequence[int]:
        return tuple(itertools.chain(*self._groups()))

    def owner_rule(self, table: Shape) -> _core.OwnerRule | None:
        return self._by_row().owner_rule(table)

    def described(self, table: Shape) -> tuple[str, str]:
        groups = self._groups()
        cut = self._by_row().described(table)[1].rpartition(", ")[2]
        shown = [f"({first_ranks(group)})" for group in groups[:4]]
        more = len(groups) - len(shown)
        return "grid", f"{' '.join(shown)}{f' and {more:,} more' if more else ''}, {cut}"

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        assert self.groups is not None
        return self.groups

    def _by_row(self) -> RowWise:
        """Return how rows are cut among the groups."""
        return RowWise(self.placement)
