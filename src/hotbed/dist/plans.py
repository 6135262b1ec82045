"""`Plan`: which rank keeps what."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from hotbed.arrays import id_tensor, integer, iterated
from hotbed.dist import plan_files
from hotbed.dist.plan_table import PlanCost, RankLine, TableLine, printed
from hotbed.dist.sizes import Load, RankSums, Sizes, TierSizes
from hotbed.errors import PlanError
from hotbed.files import Json
from hotbed.paths import path_text
from hotbed.sharding import Extent, GridWise, Sharding, checked_world_size, sharding_of
from hotbed.sharding.kind import LEAST_IDS
from hotbed.table.checks import refuse_outside
from hotbed.tables import SUMMED, Table, part_of
from hotbed.text import warn_renamed

__all__ = ["Plan", "checked_tables"]


class Plan:
    """Which rank keeps which part of which table.

    >>> hb.dist.Plan([hb.Table("item", 64, 1000)], 4, {"item": hb.dist.ColumnWise((0, 3))})

    `hotbed.plan` makes one by a strategy. Two plans are equal if tables have the same shapes and every
    rank keeps the same; the sizes with which a plan was made do not count.

    Attributes:
        cost: predicted seconds and bytes of a step, where `Measured` has made the plan; else None.

    Args:
        tables: the tables, with distinct names.
        world_size: number of ranks.
        shardings: a kind for each table, with its ranks, or ``"row"`` or ``"replicated"``.
        sizes, tiers: what is counted and shown; see `hotbed.plan`, which gives them.

    Raises:
        PlanError: naming the table and the value that cannot be.
    """

    def __init__(
        self,
        tables: Iterable[Table],
        world_size: int,
        shardings: Mapping[str, Sharding | str],
        *,
        sizes: Sizes | None = None,
        tiers: TierSizes | None = None,
    ) -> None:
        self.world_size = checked_world_size(world_size)
        self.tables: dict[str, Table] = {table.name: table for table in checked_tables(tables)}
        if not isinstance(shardings, Mapping):
            raise PlanError(f"shardings must be a dict table name → kind, not {shardings!r}.")
        for name in shardings:
            if name not in self.tables:
                raise PlanError(f"The plan has a table {name!r}, which the model has not.")
        self.shardings: dict[str, Sharding] = {}
        for name, table in self.tables.items():
            if name not in shardings:
                raise PlanError(f"Table {name!r} is missing in the plan.")
            self.shardings[name] = _checked(table, shardings[name], self.world_size)
        self.sizes = sizes or Sizes()
        self.tiers = tiers or TierSizes()
        self.cost: PlanCost | None = None
        self._loads: list[Load] | None = None
        self._digest = ""

    def on(self, ranks: Sequence[int], world_size: int) -> Plan:
        """Return the same plan where ``ranks[k]`` takes the place of rank k.

        The other ranks of `world_size` keep nothing but replicated tables.

        >>> plan = hb.plan([hb.Table("item", 64, 1000)], 2)
        >>> plan.on((6, 7), 8)     # all rows lie on two memory hosts

        Raises:
            PlanError: ranks are none, or not as many as the plan is for; a kind of a user's has no `on`.
        """
        numbers = [integer(rank) for rank in ranks] if isinstance(ranks, Sequence) else []
        placed = [rank for rank in numbers if rank is not None]
        if len(set(placed)) != len(numbers) or len(placed) != self.world_size:
            raise PlanError(
                f"The plan is for {self.world_size} ranks; name as many, each once, not {ranks!r}."
            )
        size = checked_world_size(world_size)
        for rank in placed:
            if not 0 <= rank < size:
                raise PlanError(f"Rank {rank} is outside [0, {size}).")
        shardings = {}
        for name, kind in self.shardings.items():
            try:
                shardings[name] = kind.on(placed)
            except PlanError as error:
                raise PlanError(f"Table {name!r}: {error}") from None
        return Plan(self.tables.values(), size, shardings, sizes=self.sizes, tiers=self.tiers)

    def part(self, name: str, rank: int) -> Table:
        """Return what `rank` keeps of a table: the table itself, or a `TablePart`, which may have no rows.

        Raises:
            PlanError: there is no such table or rank.
        """
        table, of = self._table(name), integer(rank)
        if of is None or not 0 <= of < self.world_size:
            raise PlanError(f"Rank {rank!r} is outside [0, {self.world_size}).")
        return part_of(table, self.shardings[name].kept(table, of, self.world_size))

    def owner_of(self, name: str, ids: object, *, column: int = 0, requester: int = 0) -> Tensor:
        """Return (n,) int64: the rank that `requester` asks for (n,) ids (a tensor, an array, a list).

        Where columns are cut, it is asked for `column` of their rows. For a replicated table the requester
        asks itself.

        Raises:
            IdError, InputError: no ids of the table.
            PlanError: there is no such table, column or rank.
        """
        table, at, asks = self._table(name), integer(column), integer(requester)
        if at is None or not 0 <= at < table.dim:
            raise PlanError(f"Table {name!r}: column {column!r} is outside [0, {table.dim}).")
        if asks is None or not 0 <= asks < self.world_size:
            raise PlanError(f"Rank {requester!r} is outside [0, {self.world_size}).")
        wanted = id_tensor(f"Table {name!r}", ids).long()
        refuse_outside(table, wanted)
        return self.shardings[name].owner_of(table, wanted, self.world_size, at, asks)

    def keeper_of(self, name: str, ids: object, *, column: int = 0, requester: int = 0) -> Tensor:
        """Earlier name of `owner_of`."""
        warn_renamed("keeper_of", "owner_of")
        return self.owner_of(name, ids, column=column, requester=requester)

    @property
    def loads(self) -> list[Load]:
        """Return the bytes of each rank."""
        if self._loads is None:
            self._loads = self._summed()
        return self._loads

    @property
    def missing(self) -> list[int]:
        """Return the bytes of each rank for which its tiers have no room."""
        return [self.tiers.filled(load)[1] for load in self.loads]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that two ranks have in common if their plans are equal."""
        if not self._digest:
            said = [self.world_size, *(self._said(name) for name in sorted(self.tables))]
            self._digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        return self._digest

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as TOML, which `read` reads.

        Raises:
            OSError: it cannot be written.
            PlanError: a table's name cannot be in a file.
        """
        notes = {
            name: f"{'any id' if t.rows is None else f'{t.rows:,} rows'} x {t.dim} {_dtype(t)}"
            for name, t in self.tables.items()
        }
        text = plan_files.text_of(self.world_size, self.shardings, notes)
        plan_files.write_file(path_text(path), text)

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        tables: Iterable[Table],
        *,
        sizes: Sizes | None = None,
        tiers: TierSizes | None = None,
    ) -> Plan:
        """Read a plan from a TOML file, for these tables; the order of either does not matter.

        Raises:
            PlanError: naming the file and what in it is wrong.
        """
        named = path_text(path)
        world_size, shardings = plan_files.read_file(named)
        tables = checked_tables(tables)
        try:
            return cls(tables, world_size, shardings, sizes=sizes, tiers=tiers)
        except PlanError as error:
            raise PlanError(f"{named}: {error}") from None

    def as_json(self) -> dict[str, Json]:
        """Return the plan as plain values, in the form of its file."""
        return plan_files.values_of(self.world_size, self.shardings)

    @classmethod
    def from_json(cls, values: object, tables: Iterable[Table]) -> Plan:
        """Return the plan for these tables of the values that `as_json` returned.

        Raises:
            PlanError: they are of no plan, or it does not fit the tables.
        """
        return cls(tables, *plan_files.from_values(values))

    def printed(self, width: int = 100) -> str:
        """Return the plan as tables of `width` characters: who keeps what, and bytes by tier."""
        title = f"{len(self.tables):,} tables on {self.world_size:,} ranks, plan {self.digest[:12]}"
        notes = []
        if any(table.combiner in SUMMED for table in self.tables.values()):
            split = f"{LEAST_IDS} (of tables cut by row {LEAST_IDS * self.world_size}"
            groups = {
                len(k.groups or ()) for k in self.shardings.values() if isinstance(k, GridWise)
            }
            split += "".join(f", as a grid of {n} groups {LEAST_IDS * n}" for n in sorted(groups))
            split += ") ids or more"
            notes.append(f"Bags of {split} are pooled by the ranks that keep their rows.")
        if self.cost is not None:
            notes.append(self.cost.said)
        return printed(title, self._table_lines(), self._rank_lines(), width, notes)

    def __str__(self) -> str:
        return self.printed()

    def __repr__(self) -> str:
        return f"Plan({len(self.tables)} tables, world_size={self.world_size}, {self.digest[:12]})"

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def _table(self, name: str) -> Table:
        if not isinstance(name, str) or name not in self.tables:
            raise PlanError(f"The plan has no table {name!r}.")
        return self.tables[name]

    def _summed(self) -> list[Load]:
        rows, indices = RankSums(self.world_size), RankSums(self.world_size)
        for name, table in self.tables.items():
            for extent in self._extents(name):
                load = self.sizes.load_of(table, extent.rows, extent.columns)
                rows.add(extent.ranks, load.rows)
                indices.add(extent.ranks, load.indices)
        return [Load(*both) for both in zip(rows.of_ranks(), indices.of_ranks(), strict=True)]

    def _extents(self, name: str) -> list[Extent]:
        table = self.tables[name]
        extents = self.shardings[name].extents(table, self.sizes.rows_of(table), self.world_size)
        return [extent for extent in extents if len(extent.ranks)]

    def _said(self, name: str) -> list[object]:
        """Return the fields of a table that ranks must agree on."""
        table = self.tables[name]
        return [name, table.rows, table.dim, _dtype(table), repr(self.shardings[name])]

    def _table_lines(self) -> list[TableLine]:
        lines = []
        for name, table in self.tables.items():
            loads = [
                len(e.ranks) * self.sizes.load_of(table, e.rows, e.columns).total
                for e in self._extents(name)
            ]
            expected = self.sizes.expected_rows.get(name)
            how = self.shardings[name].described(table)
            shape = (name, table.rows, expected, table.dim, _dtype(table))
            cost = None if self.cost is None else self.cost.tables[name]
            lines.append(TableLine(*shape, *how, sum(loads), cost))
        return lines

    def _rank_lines(self) -> list[RankLine]:
        shards = RankSums(self.world_size)
        for name, table in self.tables.items():
            for extent in self._extents(name):
                shards.add(extent.ranks, int(extent.rows > 0 or table.rows is None))
        work = [None] * self.world_size if self.cost is None else self.cost.of_ranks
        of_ranks = zip(shards.of_ranks(), self.loads, work, strict=True)
        return [
            RankLine(rank, count, self.tiers.filled(load)[0], load.total, seconds)
            for rank, (count, load, seconds) in enumerate(of_ranks)
        ]


def checked_tables(given: object) -> list[Table]:
    """Raises PlanError where they are no tables, or two have one name."""
    each = iterated(given)
    if each is None:
        raise PlanError(f"tables must be several hotbed.Table, not {given!r}.")
    tables, names = list(each), set()
    for table in tables:
        if not isinstance(table, Table):
            raise PlanError(f"tables must be hotbed.Table, not {table!r}.")
        if table.name in names:
            raise PlanError(
                f"Two tables are named {table.name!r}; a plan tells them by their names."
            )
        names.add(table.name)
    if not tables:
        raise PlanError("A plan needs at least one table.")
    return tables


def _checked(table: Table, given: object, world_size: int) -> Sharding:
    try:
        sharding = sharding_of(given)
    except PlanError as error:
        raise PlanError(f"Table {table.name!r}: {error}") from None
    if fault := sharding.fault(table, world_size):
        raise PlanError(f"Table {table.name!r}: {fault}.")
    return sharding.settled(table)


def _dtype(table: Table) -> str:
    return str(table.dtype).removeprefix("torch.")
