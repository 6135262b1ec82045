"""A training step on many GPUs: the planner's own costs, with `hotbed.dist.Rates` that assumptions give."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

import hotbed as hb
from benchmarks.simulated_assumptions import KERNELS_OF, AssumptionError, Assumptions
from benchmarks.simulated_model import tables_of, traffic_of
from hotbed.dist import GridWise, Measured, Plan, Rates, RowWise, Sharding, Traffic
from hotbed.dist.costs import Costs, TableCost
from hotbed.dist.rates import PHASES, UNITS
from hotbed.dist.sizes import Sizes, TierSizes, states_of
from hotbed.dist.strategies import STRATEGIES

__all__ = [
    "DENSE",
    "DENSE_GRADIENTS",
    "Cluster",
    "Predicted",
    "below_of",
    "predicted",
    "shortest_plan",
    "starts_of",
]

DENSE, DENSE_GRADIENTS = "dense layers", "dense gradients"
"""Phases of a step beside those of tables."""

_COUNT_BYTES, _WITH_HANDSHAKE = 8, 1024
"""Of a number that ranks tell each other; so many go along with a handshake."""
_HANDSHAKES = {"forward_call": 1, "step_call": 2}
"""In a lookup one; in a step one and a vote."""
_MESSAGES = {"forward_call": 2, "step_call": 1}
"""All-to-alls, for each part of a call: ids and rows; gradients."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """So many GPUs, by what is assumed of them and of the links between them."""

    assumed: Assumptions
    gpus: int
    network: str = "InfiniBand"

    @property
    def machines(self) -> int:
        return math.ceil(self.gpus / self.assumed["GPUs a machine"])

    @property
    def table_memory(self) -> float:
        """Return bytes of a GPU for tables."""
        return self.assumed["memory"] * self.assumed["share of memory for tables"]

    @property
    def all_to_all_byte(self) -> float:
        """Return seconds of a byte that goes to, or comes from, the other GPUs, as many to each: those of
        its machine over NVLink, the others over its NIC at the same time."""
        others = self.gpus - 1
        if not others:
            return 0.0
        inside = min(self.gpus, int(self.assumed["GPUs a machine"])) - 1
        nic = self.assumed[f"{self.network} NIC"] * self.assumed["NIC share of an all-to-all"]
        return max(inside / self._nvlink, (others - inside) / nic) / others

    @property
    def _nvlink(self) -> float:
        return self.assumed["NVLink"] * self.assumed["NVLink share"]

    @property
    def _collective(self) -> float:
        """Bytes a second of a ring through all GPUs, which leaves a machine by all of its NICs."""
        if self.machines == 1:
            return self._nvlink
        nic = self.assumed[f"{self.network} NIC"] * self.assumed["NIC share of a collective"]
        return min(self._nvlink, nic * self.assumed["GPUs a machine"])

    def all_gather(self, nbytes: float) -> float:
        """Return seconds until each GPU has `nbytes` of every one: a ring."""
        if self.gpus == 1:
            return 0.0
        between = self.machines - 1
        steps = (self.gpus - 1 - between) * self.assumed["ring step over NVLink"]
        steps += between * self.assumed[f"ring step over {self.network}"]
        return (
            self.assumed["start of a collective"]
            + steps
            + nbytes * (self.gpus - 1) / self._collective
        )

    def all_reduce(self, nbytes: float) -> float:
        """Return seconds of a sum of `nbytes` over all GPUs: rings in machines, a tree between them."""
        if self.gpus == 1:
            return 0.0
        inside = min(self.gpus, int(self.assumed["GPUs a machine"])) - 1
        steps = inside * self.assumed["ring step over NVLink"]
        steps += math.log2(self.machines) * self.assumed[f"ring step over {self.network}"]
        sent = 2 * nbytes * (self.gpus - 1) / self.gpus
        return self.assumed["start of a collective"] + 2 * steps + sent / self._collective

    def rates(self, *, below: float = 0.0, counts: int = 0, parts: int = 1) -> Rates:
        """Return seconds of the units of work.

        Args:
            below: share of the rows that lie in host memory, which go over PCIe.
            counts: numbers that a rank tells all others in a lookup.
            parts: of a call: tables whose rows travel, tables whose bags do.
        """
        assumed = self.assumed
        seconds = dict.fromkeys(UNITS, 0.0)
        for unit, kernels in KERNELS_OF.items():
            bandwidth = assumed["memory bandwidth"] * assumed[kernels]
            seconds[unit] = assumed[f"moved: {unit}"] / bandwidth
        seconds["grouped_id"] = assumed["deduplication"]
        pcie = assumed["PCIe"] * assumed["PCIe share"]
        seconds["cold_byte"] = seconds["cold_updated_byte"] = below / pcie
        seconds["received_byte"] = seconds["received_gradient_byte"] = self.all_to_all_byte
        seconds["inside_byte"] = seconds["inside_gradient_byte"] = 1 / self._nvlink
        waits = assumed["host work not hidden"] / assumed["host speed"]
        for name in assumed.lines:
            if name.startswith("host: "):
                seconds[name.removeprefix("host: ")] = assumed[name] * waits
        for call, latency in self._latencies(counts, parts).items():
            seconds[call] += latency
        return Rates(**seconds)

    def _latencies(self, counts: int, parts: int) -> dict[str, float]:
        """Seconds of a call's messages, however few bytes they have."""
        if self.gpus == 1:
            return {}
        handshake = self.all_gather(self.assumed["handshake"])
        message = self.assumed["start of a collective"]
        message += (self.gpus - 1) * self.assumed["message to a rank"]
        found = {
            call: handshakes * handshake + parts * _MESSAGES[call] * message
            for call, handshakes in _HANDSHAKES.items()
        }
        if counts > _WITH_HANDSHAKE:
            found["forward_call"] += self.all_gather(_COUNT_BYTES * counts)
        return found

    def measured(self, rates: Rates, traffic: Mapping[str, Traffic]) -> Measured:
        """Return the planner's strategy by these figures."""
        rows, gradients = (self.assumed.text(f"{what} travel as") for what in ("rows", "gradients"))
        return Measured(rates, traffic, rows=rows, gradients=gradients)

    def cost(self, plan: Plan, traffic: Mapping[str, Traffic], rates: Rates) -> TableCost:
        """Return what the tables of a plan cost in a step."""
        costs = self.measured(rates, traffic).costs_of(plan)
        return costs.of_plan(plan.tables, plan.shardings)

    def dense(self) -> dict[str, float]:
        """Return seconds of the dense part, by phase."""
        assumed = self.assumed
        flop = assumed["batch"] * assumed["dense FLOP"]
        shown = 1 - assumed["hidden dense gradients"]
        return {
            DENSE: flop / (assumed["dense FLOP/s"] * assumed["dense utilisation"]),
            DENSE_GRADIENTS: shown * self.all_reduce(4 * assumed["dense parameters"]),
        }


class Predicted(NamedTuple):
    """A step of a cluster."""

    cluster: Cluster
    phases: dict[str, float]
    """Seconds, by phase: of the slowest rank in each."""
    sent: float
    """Bytes that the rank which sends most sends for tables."""
    links: float
    """Seconds that the step would be shorter if bytes took no time on links, nor messages."""
    handshake: float
    """Bytes that each rank gets in handshakes and as counts."""
    below: float
    """Share of the rows in host memory."""
    plan: Plan

    @property
    def step(self) -> float:
        return sum(self.phases.values())

    @property
    def samples_a_second(self) -> float:
        return self.cluster.gpus * self.cluster.assumed["batch"] / self.step

    def efficiency(self, base: Predicted) -> float:
        """Return samples a second of a GPU over those of another cluster's."""
        ours, theirs = (each.samples_a_second / each.cluster.gpus for each in (self, base))
        return ours / theirs

    @property
    def kinds(self) -> str:
        """Return how tables are cut, in words."""
        counted = collections.Counter(kind.name for kind in self.plan.shardings.values())
        return ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))


def shortest_plan(cluster: Cluster) -> Plan:
    """Return the plan with the shortest step that is found for these GPUs.

    Raises:
        AssumptionError: memory of GPUs and hosts does not hold the tables.
    """
    traffic = traffic_of(cluster.assumed, cluster.gpus)
    rates = cluster.rates(below=below_of(cluster))
    strategy, starts = cluster.measured(rates, traffic), starts_of(cluster)
    named = {name: start for name, start in starts.items() if name in STRATEGIES}
    found = [strategy.best_of(some) for some in (named, starts)]
    plan = min(found, key=lambda one: (sum(one.missing), _step_of(one)))
    if any(plan.missing):
        raise AssumptionError(
            f"{cluster.gpus} GPUs and their hosts lack {max(plan.missing) / 1e9:,.1f} GB each for the "
            "tables. Change 'rows', 'dim', 'host memory' or the number of GPUs."
        )
    return plan


def _step_of(plan: Plan) -> float:
    assert plan.cost is not None
    return plan.cost.step


def predicted(cluster: Cluster, plan: Plan | None = None) -> Predicted:
    """Return the step by a plan. Default: the shortest that is found.

    Raises:
        AssumptionError: as of `shortest_plan`.
    """
    plan = plan or shortest_plan(cluster)
    traffic, below = traffic_of(cluster.assumed, cluster.gpus), below_of(cluster)
    counts = _told(plan)
    rates = cluster.rates(below=below, counts=counts, parts=_parts(plan, traffic))
    cost = cluster.cost(plan, traffic, rates)
    alone = dataclasses.replace(cluster, gpus=1).rates(below=below)
    without = cluster.cost(plan, traffic, alone)
    dense = cluster.dense()
    numbers = counts if counts > _WITH_HANDSHAKE else 0
    gathered = sum(_HANDSHAKES.values()) * cluster.assumed["handshake"] + _COUNT_BYTES * numbers
    return Predicted(
        cluster,
        {**dict(zip(PHASES, cost.seconds.max((1, 2)).tolist(), strict=True)), **dense},
        float(cost.sent.sum(0).max()),
        cost.step - without.step + dense[DENSE_GRADIENTS],
        gathered * (cluster.gpus - 1),
        below,
        plan,
    )


def below_of(cluster: Cluster) -> float:
    """Return the share of all rows and states that GPUs have no room for."""
    sizes = Sizes(states_of(cluster.assumed.text("optimizer")))
    total = sum(sizes.bytes_of(table) for table in tables_of(cluster.assumed))
    return max(0.0, 1 - cluster.gpus * cluster.table_memory / total)


def starts_of(cluster: Cluster) -> dict[str, Plan]:
    """Return plans to begin a search with: those of the named strategies, and what these leave out, as they
    are for few ranks: every table by row, and by row among machines."""
    tables, gpus = tables_of(cluster.assumed), cluster.gpus
    storage = {"device": int(cluster.table_memory), "host": int(cluster.assumed["host memory"])}
    tiers, sizes = TierSizes.of(storage, None), Sizes(states_of(cluster.assumed.text("optimizer")))
    shardings: dict[str, Mapping[str, Sharding]] = {
        name: hb.plan(tables, gpus, strategy=name).shardings for name in STRATEGIES
    }
    shardings["row"] = {table.name: RowWise() for table in tables}
    machine = int(cluster.assumed["GPUs a machine"])
    if gpus > machine and gpus % machine == 0 and cluster.assumed["dim"] >= machine:
        grid = GridWise.of_machines(gpus, machine)
        shardings["grid"] = {table.name: grid for table in tables}
    return {
        name: Plan(tables, gpus, kinds, sizes=sizes, tiers=tiers)
        for name, kinds in shardings.items()
    }


def _told(plan: Plan) -> int:
    """Return how many numbers a rank tells all others in a lookup: of a table whose rows are split one for
    each owner, else one."""
    found = 0
    for kind in plan.shardings.values():
        groups = len(kind.groups or ()) if isinstance(kind, GridWise) else 1
        found += plan.world_size if isinstance(kind, RowWise) else groups
    return found


def _parts(plan: Plan, traffic: Mapping[str, Traffic]) -> int:
    """Return 2 where some tables' rows travel and others' bags, else 1."""
    costs = Costs(plan.world_size, Rates(), traffic, plan.sizes)
    bags = UNITS.index("bag_row")
    by_bags = {
        bool(np.any(costs.work_of(table, plan.shardings[name]).units[bags]))
        for name, table in plan.tables.items()
    }
    return len(by_bags)
