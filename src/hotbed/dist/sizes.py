"""Bytes of rows, and the tiers of a rank that they fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from hotbed import _core
from hotbed.arrays import integer
from hotbed.errors import PlanError, StorageError
from hotbed.optim import RULES, TableOptimizer
from hotbed.storage import INDEX_BYTES, Storage, parse_bytes
from hotbed.tables import Table

__all__ = [
    "OPTIMIZERS",
    "Load",
    "RankSums",
    "Sizes",
    "States",
    "TierSizes",
    "bytes_in_words",
    "expected",
    "states_of",
]

OPTIMIZERS = {rule.declared_rule().command: rule for rule in RULES}
"""By the names of the command line."""

_MOST_STATES = 1 << 20
_DYNAMIC_INDEX_BYTES = 8 + 24
"""Of a row of a dynamic table: its id, and its share of the index, which takes 20 to 24."""


class _States(NamedTuple):
    per_column: int = 0
    per_row: int = 0


class States(_States):
    """Numbers of optimizer state in a row, in the dtype of the table's arithmetic.

    Args:
        per_column: for each of its columns.
        per_row: for the whole row.

    Raises:
        PlanError: numbers that cannot be.
    """

    __slots__ = ()

    def __new__(cls, per_column: int = 0, per_row: int = 0) -> States:
        numbers = []
        for name, given in (("per_column", per_column), ("per_row", per_row)):
            number = integer(given)
            if number is None or not 0 <= number <= _MOST_STATES:
                raise PlanError(
                    f"States: {name} must be a number from 0 to {_MOST_STATES:,}, not {given!r}."
                )
            numbers.append(number)
        return super().__new__(cls, *numbers)


class Load(NamedTuple):
    """Bytes that a rank keeps."""

    rows: int
    """Weights and optimizer states."""
    indices: int
    """Of dynamic tables, and of an SSD."""

    @property
    def total(self) -> int:
        return self.rows + self.indices


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a row, and the number of rows that a dynamic table will have."""

    states: States = States()
    expected_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    on_ssd: bool = False
    """Whether static tables have an index, that of an SSD."""

    def rows_of(self, table: Table) -> int:
        return self.expected_rows.get(table.name, 0) if table.rows is None else table.rows

    def load_of(self, table: Table, rows: int, columns: int) -> Load:
        states = self.states.per_column * columns + self.states.per_row
        row = columns * table.dtype.itemsize + states * table.compute_dtype.itemsize
        index = _DYNAMIC_INDEX_BYTES if table.rows is None else INDEX_BYTES * self.on_ssd
        return Load(rows * row, rows * index)

    def bytes_of(self, table: Table) -> int:
        """Return the bytes of one copy of a table."""
        return self.load_of(table, self.rows_of(table), table.dim).total


class TierSizes(NamedTuple):
    """Bytes that each tier of a rank holds, the uppermost first; None: no limit. No tiers: all fits."""

    bytes: tuple[tuple[str, int | None], ...] = ()

    @classmethod
    def of(cls, storage: object, memory: int | str | None) -> TierSizes:
        """Return the tiers that the arguments of `hotbed.plan` say.

        Raises:
            PlanError: they are none.
        """
        if storage is None:
            return cls(() if memory is None else (("memory", _parsed("memory", memory)),))
        if memory is not None:
            raise PlanError(
                f"Give memory={memory!r}, or storage= with a size for each tier, not both."
            )
        if isinstance(storage, Storage):
            named = {"device": storage.device, "host": storage.host}
            ssd = {} if storage.ssd is None else {"ssd": None}
            storage = {name: size for name, size in named.items() if size is not None} | ssd
        names = ("device", "host", "ssd")
        if not isinstance(storage, Mapping) or not storage or any(n not in names for n in storage):
            raise PlanError(
                'storage must be a hotbed.Storage, or sizes of a rank\'s tiers such as {"device": "80GB", '
                f'"host": "400GB", "ssd": "4TB"}}, not {storage!r}.'
            )
        if list(storage) == ["ssd"]:
            raise PlanError("storage: an SSD needs a host= or device= tier, where its index lies.")
        sizes = {n: storage[n] for n in names if n in storage}
        return cls(tuple((n, None if s is None else _parsed(n, s)) for n, s in sizes.items()))

    @property
    def on_ssd(self) -> bool:
        return any(name == "ssd" for name, _ in self.bytes)

    def filled(self, load: Load) -> tuple[dict[str, int], int]:
        """(bytes in each tier, bytes that find no room). The index lies in the lowest memory; rows fill
        what is left from the top down."""
        if not self.bytes:
            return {"bytes": load.total}, 0
        lowest = [name for name, _ in self.bytes if name != "ssd"][-1]
        left, missing, filled = load.rows, 0, {}
        for name, size in self.bytes:
            index = load.indices if name == lowest else 0
            room = max(0, index + left if size is None else size)
            missing += max(0, index - room)
            index = min(index, room)
            rows = min(left, room - index)
            filled[name], left = index + rows, left - rows
        return filled, missing + left


def _parsed(tier: str, size: int | str) -> int:
    try:
        found = parse_bytes(size)
    except StorageError as error:
        raise PlanError(f"The tier {tier!r}: {error}") from None
    if not found:
        raise PlanError(f"The tier {tier!r} is {size!r}; give what it holds, or leave it out.")
    return found


def states_of(optimizer: object) -> States:
    """Return the states of an optimizer by its name, such as ``"rowwise-adagrad"``, its class, or a `States`
    for options that add some; None: no states.

    Raises:
        PlanError: there is no such optimizer.
    """
    if optimizer is None or isinstance(optimizer, States):
        return optimizer or States()
    rule = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if not isinstance(rule, type) or not issubclass(rule, TableOptimizer):
        raise PlanError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)}, a class of hotbed.optim, or a "
            f"hotbed.dist.States, not {optimizer!r}."
        )
    options = _core.RuleOptions()
    options.rule = getattr(_core.Rule, rule.declared_rule().core)
    one_a_row = [flag for _, flag, _ in _core.state_planes(options)]
    return States(one_a_row.count(False), one_a_row.count(True))


def expected(tables: Mapping[str, Table], given: Mapping[str, int] | None) -> dict[str, int]:
    """Rows that dynamic tables are expected to have, checked.

    Raises:
        PlanError: a name is of no dynamic table, or a number is none.
    """
    if not isinstance(given, Mapping | None):
        raise PlanError(f"expected_rows must be a dict of rows by table, not {given!r}.")
    for name, rows in (given or {}).items():
        if name not in tables or tables[name].rows is not None:
            raise PlanError(
                f"expected_rows: {name!r} is no dynamic table; a static one has the rows it has."
            )
        if not isinstance(rows, int) or isinstance(rows, bool) or not 0 <= rows < 2**63:
            raise PlanError(f"expected_rows: table {name!r} cannot have {rows!r} rows.")
    return dict(given or {})


def bytes_in_words(size: int) -> str:
    """``"1.5 GB"``, in units of 1000, as sizes are given."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while value >= 999.95 and len(units) > 1:
        value, _ = value / 1000, units.pop(0)
    return f"{size} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


class RankSums:
    """A sum for each rank, to which ranges of ranks are added."""

    def __init__(self, world_size: int) -> None:
        self._steps = [0] * (world_size + 1)

    def add(self, ranks: range, value: int) -> None:
        self._steps[ranks.start] += value
        self._steps[ranks.stop] -= value

    def of_ranks(self) -> list[int]:
        sums, total = [], 0
        for step in self._steps[:-1]:
            total += step
            sums.append(total)
        return sums
