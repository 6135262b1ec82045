"""Base of the kinds of sharding.

Shapes: n ids.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from hotbed import _core
from hotbed.errors import PlanError

__all__ = ["LEAST_IDS", "Extent", "Kept", "Shape", "Sharding"]


class Shape(Protocol):
    """Facts of a table that a kind must know; a `Table` has them."""

    @property
    def rows(self) -> int | None: ...

    @property
    def dim(self) -> int: ...


class Extent(NamedTuple):
    """Each of `ranks` keeps so many rows of so many columns."""

    ranks: range
    rows: int
    columns: int


class Kept(NamedTuple):
    """Shard that one rank keeps: ids ``first``, ``first + stride``, ..., columns from ``begin`` to before
    ``end``. Of a dynamic table the ids for which `owns` is true; None: all."""

    begin: int
    end: int
    first: int = 0
    stride: int = 1
    owns: Callable[[Tensor], Tensor] | None = None


LEAST_IDS = 2
"""Ids of a bag, for each rank among which rows are split, from which on the ranks that keep them pool it."""


class Sharding(abc.ABC):
    """A way to cut a table among ranks."""

    name: ClassVar[str]
    """Name of the kind in files and tables."""

    replicated: ClassVar[bool] = False
    """True if every rank keeps the whole table."""

    __slots__ = ()

    @classmethod
    def candidates(cls, table: Shape, ranks: Sequence[int]) -> Sequence[Sharding]:
        """Return placed values of this kind among which a plan may choose; none: the kind is only taken where
        a table asks for it.

        Args:
            ranks: all of them, those first that have least to do.
        """
        return ()

    @property
    def placed(self) -> bool:
        """True if it says which ranks keep something."""
        return True

    def on(self, ranks: Sequence[int]) -> Sharding:
        """Return the same kind where ``ranks[k]`` takes the place of rank k.

        Raises:
            PlanError: the kind has no such method.
        """
        if self.replicated or not self.placed:
            return self
        raise PlanError(f"sharding {self.name!r} has no method on(), which names other ranks.")

    def slices(self, table: Shape, wanted: int, world_size: int) -> int:
        """Return the number of column slices in which a plan places a table; `wanted`: by its threshold."""
        return 1

    def settled(self, table: Shape) -> Sharding:
        """Return the same with all that depends on the table, so that equal cuts are equal values.

        `fault` must find nothing wrong with the table.
        """
        return self

    @abc.abstractmethod
    def fault(self, table: Shape, world_size: int) -> str:
        """Return why the table cannot be cut so; empty if it can."""

    @abc.abstractmethod
    def extents(self, table: Shape, rows: int, world_size: int) -> list[Extent]:
        """How much each rank keeps of `rows` rows; ranks that keep nothing may be left out."""

    @abc.abstractmethod
    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        """Return the shard that `rank` keeps; None: nothing."""

    @abc.abstractmethod
    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        """Return (n,) int64: the rank that `requester` asks for a column of the rows of (n,) int64 ids."""

    def owner_rule(self, table: Shape) -> _core.OwnerRule | None:
        """Return how owners of rows are found; `OwnerRule.given`: by `owner_of`; None: rows are not split."""
        return None

    def in_order(self, world_size: int) -> Sequence[int]:
        """Return the ranks that may keep something, owners of rows as `owner_rule` numbers them."""
        return range(world_size)

    @abc.abstractmethod
    def described(self, table: Shape) -> tuple[str, str]:
        """(how it is cut, which ranks keep it), for people."""
