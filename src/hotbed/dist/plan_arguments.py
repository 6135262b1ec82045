"""Arguments of a plan, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hotbed.dist.measured import Measured
from hotbed.dist.plans import Plan
from hotbed.dist.sizes import Sizes, States, TierSizes
from hotbed.dist.strategies import STRATEGIES, Thresholds
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

    def plan(self) -> Plan:
        """Whether it fits or not."""
        if isinstance(self.strategy, Measured):
            return self.strategy.best_of({name: self._named(name) for name in STRATEGIES})
        return self._named(self.strategy)

    def _named(self, strategy: str) -> Plan:
        sizes = Sizes(self.states, self.expected_rows, self.tiers.on_ssd)
        choose = STRATEGIES[strategy]
        chosen = choose(self.tables, self.world_size, self.thresholds, sizes)
        return Plan(self.tables, self.world_size, chosen, sizes=sizes, tiers=self.tiers)

    @property
    def fits(self) -> bool:
        return not any(self.plan().missing)

    @property
    def arguments(self) -> dict[str, Any]:
        """For `plan`."""
        column, row, data_parallel = self.thresholds
        named = dict(self.tiers.bytes)
        return {
            "tables_or_model": list(self.tables),
            "world_size": self.world_size,
            "strategy": self.strategy,
            "column_slice_threshold": column,
            "row_slice_threshold": row,
            "data_parallel_threshold": data_parallel,
            "optimizer": self.optimizer,
            "expected_rows": self.expected_rows,
            **({"memory": named["memory"]} if "memory" in named else {"storage": named or None}),
        }
