"""Arguments of a plan, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hotbed.dist.grids import among_machines, with_grids
from hotbed.dist.measured import Measured
from hotbed.dist.plans import Plan
from hotbed.dist.sizes import Sizes, States, TierSizes
from hotbed.dist.strategies import STRATEGIES, Strategy, Thresholds, by_row
from hotbed.optim.base import TableOptimizer
from hotbed.tables import Table

__all__ = ["Request"]


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of `plan`, checked."""

    tables: tuple[Table, ...]
    world_size: int
    strategy: str | Measured
    thresholds: Thresholds
    optimizer: str | type[TableOptimizer] | States | None
    states: States
    expected_rows: Mapping[str, int]
    tiers: TierSizes
    local_world_size: int | None = None

    def plan(self) -> Plan:
        """Whether it fits or not."""
        if isinstance(self.strategy, Measured):
            named = {name: self._chosen(choose) for name, choose in STRATEGIES.items()}
            others = [self._chosen(by_row, grids) for grids in (False, True)]
            strategy = dataclasses.replace(self.strategy, local_world_size=self.local_world_size)
            return strategy.best_of(named, others)
        return self._chosen(STRATEGIES[self.strategy])

    def _chosen(self, choose: Strategy, grids: bool = True) -> Plan:
        sizes = Sizes(self.states, self.expected_rows, self.tiers.on_ssd)
        machines = self.world_size, self.local_world_size
        tables = with_grids(self.tables, *machines)
        chosen = choose(tables, self.world_size, self.thresholds, sizes)
        cuts_columns = self.optimizer is not None and not self.states.per_row
        if grids and cuts_columns:
            chosen = among_machines(tables, chosen, *machines)
        return Plan(self.tables, self.world_size, chosen, sizes=sizes, tiers=self.tiers)

    @property
    def fits(self) -> bool:
        if self.local_world_size is not None and self.world_size % self.local_world_size:
            return False
        return not any(self.plan().missing)

    @property
    def arguments(self) -> dict[str, Any]:
        """For `plan`."""
        column, row, data_parallel = self.thresholds
        named, local = dict(self.tiers.bytes), self.local_world_size
        return {
            "tables_or_model": list(self.tables),
            "world_size": self.world_size if local is None else (self.world_size // local, local),
            "strategy": self.strategy,
            "column_slice_threshold": column,
            "row_slice_threshold": row,
            "data_parallel_threshold": data_parallel,
            "optimizer": self.optimizer,
            "expected_rows": self.expected_rows,
            **({"memory": named["memory"]} if "memory" in named else {"storage": named or None}),
        }
