"""`Measured`: the strategy that takes the plan whose predicted step is shortest.

It starts from the best plan of the named strategies, and from one that cuts all tables by row, and gives one
table after another the kind of sharding with which the step is shortest, until nothing becomes shorter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.dist.costs import Costs, Floats, TableCost
from hotbed.dist.plan_table import PlanCost, TableChoice
from hotbed.dist.plans import Plan
from hotbed.dist.rates import Rates
from hotbed.dist.sizes import Load, bytes_in_words
from hotbed.dist.strategies import wished
from hotbed.dist.traffic import Traffic
from hotbed.errors import PlanError
from hotbed.sharding import KINDS, Sharding, checked_local_size
from hotbed.tables import Table

__all__ = ["Measured", "predict"]

Ints = NDArray[np.int64]

_ROUNDS, _LITTLE = 4, 1e-3
"""Times that all tables are gone through; a round that saves less than this part of a step is the last."""
_WORTH = 0.99
"""A plan of no named strategy must take at most this part of the best one's predicted step."""
_EQUAL = 1e-9
"""Part of a step by which two steps may differ and count as equal."""
_ASSUMED_ROWS = 1_000_000
_MOST_BYTES = 2**63 - 1
"""Of a rank, which are counted in int64."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Strategy of `hotbed.plan` by predicted costs: of a machine's `Rates` and of what batches ask.

    >>> rates = hb.dist.Rates()                    # or hb.dist.measure(), or Rates.read("rates.toml")
    >>> print(hb.plan(model, 8, strategy=hb.dist.Measured(rates)))

    Raises:
        PlanError: an argument that cannot be.
    """

    rates: Rates
    traffic: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    """By table. Of tables that are missing one id for each of 2,048 samples is assumed, by a power law."""
    rows: str = "stored"
    gradients: str = "stored"
    """How rows and gradients travel, as `hotbed.distribute` is told."""
    local_world_size: int | None = None
    """Ranks of a machine, as `hotbed.distribute` is told, for `predict`; `hotbed.plan` takes those of its
    ``world_size`` instead."""

    def __post_init__(self) -> None:
        if not isinstance(self.rates, Rates):
            raise PlanError(
                f"Measured: expected rates such as hotbed.dist.measure() returns, got {self.rates!r}."
            )
        if not isinstance(self.traffic, Mapping):
            raise PlanError(
                f"Measured: traffic must be a dict table name → Traffic, not {self.traffic!r}."
            )
        for name, traffic in self.traffic.items():
            if not isinstance(traffic, Traffic):
                raise PlanError(f"Measured: traffic of table {name!r} is {traffic!r}, no Traffic.")
        checked_local_size(self.local_world_size)

    def costs_of(self, plan: Plan) -> Costs:
        """Return what tables of a plan cost on its ranks.

        Raises:
            PlanError: `local_world_size` does not divide their number, or tables have too many bytes.
        """
        _refuse_uncountable(plan)
        local = self.local_world_size
        if plan.world_size % (local or 1):
            raise PlanError(
                f"Measured: local_world_size={local} does not divide the {plan.world_size} ranks of the plan."
            )
        of_tables = {
            name: self.traffic.get(name)
            or Traffic.assumed(plan.sizes.rows_of(table) or _ASSUMED_ROWS)
            for name, table in plan.tables.items()
        }
        wire = self.rows, self.gradients
        return Costs(plan.world_size, self.rates, of_tables, plan.sizes, wire, local)

    def best_of(self, named: Mapping[str, Plan], others: Sequence[Plan] = ()) -> Plan:
        """Return the plan whose predicted step is shortest.

        Args:
            named: plans of the same tables, by the names of their strategies.
            others: further plans of these tables from which it searches.
        """
        some = next(iter(named.values()))
        costs = self.costs_of(some)
        searched = {name: _Search(plan, costs) for name, plan in named.items()}
        usable = [s for s in searched.values() if s.is_allowed] or [*searched.values()]
        best = min(usable, key=lambda search: search.key)
        fastest = min(usable, key=lambda search: search.step)  # which may not fit yet
        more = [plan for plan in others if _Search(plan, costs).is_allowed]
        tries = [_Search(plan, costs) for plan in dict.fromkeys((best.plan, fastest.plan, *more))]
        for search in tries:
            search.improve()
        better = min(tries, key=lambda search: search.key)
        if better.missing < best.missing or better.step <= _WORTH * best.step:
            best = better
        return best.planned({name: search.step for name, search in searched.items()})


def predict(plan: Plan, measured: Measured) -> Plan:
    """Return a plan with its predicted costs, which ``print(plan)`` shows and `Plan.cost` has.

    Raises:
        PlanError: an argument that cannot be.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"predict: expected a plan such as hotbed.plan returns, got {plan!r}.")
    if not isinstance(measured, Measured):
        raise PlanError(f"predict: expected a hotbed.dist.Measured, got {measured!r}.")
    return _Search(plan, measured.costs_of(plan)).planned({})


class _Key(NamedTuple):
    """Order of plans, the best first."""

    missing: int
    step: float
    mean: float


class _Changed(NamedTuple):
    """A plan with another kind of one table."""

    key: _Key
    total: TableCost
    loads: Ints
    """(2, R) bytes of rows and of indices on each rank."""
    own: TableCost
    """Of the table."""
    own_loads: Ints
    """As `loads`, of the table alone."""


class _Search:
    """A plan on its way to a better one.

    Attributes:
        shardings: of all tables so far.
        step: predicted seconds.
        missing: bytes for which ranks have no room.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self._costs = plan, costs
        self.shardings = dict(plan.shardings)
        self._missing_of = functools.lru_cache(maxsize=None)(self._filled)
        self._of_tables = {n: self._cost_of(t, plan.shardings[n]) for n, t in plan.tables.items()}
        self._own_loads = {n: self._loads_of(t, plan.shardings[n]) for n, t in plan.tables.items()}
        self._total = costs.of_calls()
        self._loads = np.zeros((2, plan.world_size), np.int64)
        for name in plan.tables:
            self._total = self._total.plus(self._of_tables[name])
            self._loads += self._own_loads[name]
        self.missing, self.step, _ = self.key = self._key_of(self._total, self._loads)

    @property
    def is_allowed(self) -> bool:
        """True if the optimizer takes all tables as they are cut."""
        tables = self.plan.tables
        return all(self._is_allowed(tables[name], kind) for name, kind in self.shardings.items())

    def improve(self) -> None:
        """Give tables other kinds as long as the step becomes shorter."""
        cost = {name: one.of_ranks.sum() for name, one in self._of_tables.items()}
        order = sorted(self.shardings, key=lambda name: (-cost[name], name))
        for _ in range(_ROUNDS):
            before = self.key
            for name in order:
                self._improve(name)
            if self.missing == before.missing and before.step - self.step <= _LITTLE * before.step:
                break

    def planned(self, others: Mapping[str, float]) -> Plan:
        """Return the plan, with its costs. `others`: steps of the named strategies."""
        plan = self.plan
        made = Plan(
            plan.tables.values(),
            plan.world_size,
            self.shardings,
            sizes=plan.sizes,
            tiers=plan.tiers,
        )
        total = self._with_ssd(self._total, self._loads)
        made.cost = PlanCost(
            step=self.step,
            of_ranks=tuple(total.of_ranks.tolist()),
            sent=tuple(map(tuple, total.sent.tolist())),
            tables={name: self._choice(name) for name in self.shardings},
            strategies=dict(others),
        )
        return made

    def _improve(self, name: str) -> None:
        """Give one table the best kind."""
        best, own = self.key, self.shardings[name]
        for kind in self._options(name):
            key = self._with(name, kind).key
            if _is_better(key, best):
                best, own = key, kind
        if own is not self.shardings[name]:
            changed = self._with(name, own)
            self.key, self._total, self._loads, *_ = changed
            self._of_tables[name], self._own_loads[name] = changed.own, changed.own_loads
            self.missing, self.step, _ = self.key
            self.shardings[name] = own

    def _choice(self, name: str) -> TableChoice:
        """Return why a table is cut as it is."""
        own = self.shardings[name]
        others: dict[str, float] = {}
        for kind in self._options(name):
            if kind.name != own.name:
                key = self._with(name, kind).key
                if not key.missing or self.missing:
                    longer = key.step - self.step
                    others[kind.name] = min(longer, others.get(kind.name, longer))
        second = min(others, key=lambda kind: (others[kind], kind), default="")
        mean = float(self._of_tables[name].of_ranks.mean())
        return TableChoice(mean, second, others.get(second, 0.0))

    def _options(self, name: str) -> Iterator[Sharding]:
        table = self.plan.tables[name]
        wish = wished(table)
        is_fixed = wish is not None and wish.placed
        if is_fixed or not self.plan.sizes.rows_of(table):  # or nobody knows how large it becomes
            return
        busy = self._total.of_ranks
        ranks = sorted(range(len(busy)), key=lambda rank: (busy[rank], rank))
        for kind in KINDS.values() if wish is None else (type(wish),):
            for one in kind.candidates(table, ranks):
                settled = one.settled(table)
                if settled != self.shardings[name] and self._is_allowed(table, settled):
                    yield settled

    def _is_allowed(self, table: Table, kind: Sharding) -> bool:
        """Return False where rows are cut and the optimizer needs whole ones."""
        if not self.plan.sizes.states.per_row:
            return True
        rows = self.plan.sizes.rows_of(table)
        extents = kind.extents(table, rows, self.plan.world_size)
        return all(extent.columns == table.dim for extent in extents)

    def _with(self, name: str, kind: Sharding) -> _Changed:
        """Return key, cost and loads of the plan with another kind of one table, and that table's cost."""
        table = self.plan.tables[name]
        own, own_loads = self._cost_of(table, kind), self._loads_of(table, kind)
        total = self._total.plus(self._of_tables[name], -1.0).plus(own)
        loads = self._loads - self._own_loads[name] + own_loads
        return _Changed(self._key_of(total, loads), total, loads, own, own_loads)

    def _cost_of(self, table: Table, kind: Sharding) -> TableCost:
        return self._costs.of_table(table, kind)

    def _loads_of(self, table: Table, kind: Sharding) -> Ints:
        """(2, R) bytes of rows and of indices on each rank."""
        sizes, found = self.plan.sizes, np.zeros((2, self.plan.world_size), np.int64)
        for extent in kind.extents(table, sizes.rows_of(table), self.plan.world_size):
            some = slice(extent.ranks.start, extent.ranks.stop)
            load = sizes.load_of(table, extent.rows, extent.columns)
            found[:, some] = [[load.rows], [load.indices]]
        return found

    def _key_of(self, total: TableCost, loads: Ints) -> _Key:
        tiers, missing = self.plan.tiers, 0
        if len(tiers.bytes) == 1 and (size := tiers.bytes[0][1]) is not None:
            missing = int(np.maximum(loads.sum(0) - size, 0).sum(dtype=np.float64))
        elif tiers.bytes:
            missing = sum(self._missing_of(*load)[0] for load in zip(*loads.tolist(), strict=True))
            total = self._with_ssd(total, loads)
        return _Key(missing, total.step, float(total.of_ranks.mean()))

    def _with_ssd(self, total: TableCost, loads: Ints) -> TableCost:
        if not self.plan.tiers.on_ssd:
            return total
        shares: Floats = np.array(
            [
                self._missing_of(rows, indices)[1] / max(1, rows)
                for rows, indices in zip(*loads.tolist(), strict=True)
            ]
        )
        return self._costs.with_ssd(total, shares)

    def _filled(self, rows: int, indices: int) -> tuple[int, int]:
        """Return the bytes of a rank that find no room, and those on its SSD."""
        filled, missing = self.plan.tiers.filled(Load(rows, indices))
        return missing, filled.get("ssd", 0)


def _refuse_uncountable(plan: Plan) -> None:
    """Raise PlanError where a rank could have more bytes than are counted."""
    total = 0
    for name, table in plan.tables.items():
        total += plan.sizes.bytes_of(table)
        if total > _MOST_BYTES:
            raise PlanError(
                f"Table {name!r}: with it, tables have {bytes_in_words(total)}, and a measured plan counts "
                "less than 2**63 bytes. Give it fewer rows, or take another strategy."
            )


def _is_better(key: _Key, than: _Key) -> bool:
    """Return True for fewer missing bytes, a shorter step, or one as long with less work."""
    if key.missing != than.missing:
        return key.missing < than.missing
    if abs(key.step - than.step) > _EQUAL * than.step:
        return key.step < than.step
    return key.mean < than.mean * (1 - _EQUAL)
