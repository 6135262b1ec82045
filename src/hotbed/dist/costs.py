"""Bytes and seconds of a training step, predicted from who keeps what: arithmetic alone.

It follows what `hotbed.dist.exchange`, `hotbed.dist.by_machine` and `hotbed.dist.bags` send. Each rank is
taken to ask as much as any other. Shapes: R ranks, U units of work (`rates.UNITS`), P phases
(`rates.PHASES`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed import _core
from hotbed.dist.flows import Flow, Topology
from hotbed.dist.rates import PHASE_OF, PHASES, UNITS, Rates
from hotbed.dist.row_codecs import RowCodec, wire_of
from hotbed.dist.sizes import Sizes
from hotbed.dist.traffic import Traffic
from hotbed.sharding import Sharding
from hotbed.sharding.kind import LEAST_IDS
from hotbed.tables import SUMMED, Table

__all__ = ["SENT", "Costs", "TableCost", "Work"]

Floats = NDArray[np.float64]

INSIDE = " inside"
"""Behind the names of bytes between a rank and those of its machine that ask owners for it."""
_BY_MACHINE = tuple(f"{what}{INSIDE}" for what in ("ids", "rows", "gradients"))
SENT = ("ids", "rows", "vectors", "gradients", *_BY_MACHINE)
"""Kinds of bytes, as `Ranks.sent` names them."""
_TO_OWNERS = "ids", "gradients"
"""Of these those that go to owners; the others come from them."""

_CACHED_BYTES = 16 << 20
"""Rows of a shard up to this size are taken to stay in a cache of the processor, and its pages in that of
addresses."""
_UNIT = {name: at for at, name in enumerate(UNITS)}
_ANSWER = PHASES.index("answer")
_FORWARD_BYTES = [_UNIT["received_byte"], _UNIT["inside_byte"]]
_GRADIENT_BYTES = [_UNIT["received_gradient_byte"], _UNIT["inside_gradient_byte"]]
"""By distance."""


class TableCost(NamedTuple):
    """Cost of one table, or the sum of several."""

    sent: Floats
    """(7, R) bytes that each rank sends to others in a step, by `SENT`."""
    seconds: Floats
    """(P, 2, R): seconds of each rank's work with what comes to it, and seconds of what it sends. Both go on
    at the same time."""
    touched: Floats
    """(R,) rows that a step reads and updates on each rank."""

    def plus(self, other: TableCost, times: float = 1.0) -> TableCost:
        """Return the sum with another cost, taken so many times."""
        return TableCost(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def step(self) -> float:
        """Seconds of a step, in each phase those of the slowest rank."""
        return float(self.seconds.max((1, 2)).sum())

    @property
    def of_ranks(self) -> Floats:
        """(R,) seconds that each rank works, not counting how it waits for others."""
        found: Floats = self.seconds.max(1).sum(0)
        return found


class Work(NamedTuple):
    """Work of a step for one table."""

    sent: Floats
    """As of `TableCost`."""
    units: Floats
    """(U, 2, R) amounts of each unit: of each rank's work with what comes to it, and of what it sends."""
    touched: Floats
    """As of `TableCost`."""


class _Shards(NamedTuple):
    """Shards of a table, as messages see them."""

    share: Floats
    """(R,) of the ids that are asked, the part for which a rank is asked; 0: it keeps nothing."""
    width: Floats
    """(R,) columns."""
    rows: Floats
    """(R,) rows."""
    is_split: bool
    is_replicated: bool
    is_by_machine: bool
    """True if machines of several ranks ask for its rows together."""
    pooled_from: float
    """Ids a bag from which on owners pool; infinite: they pool no bags."""

    @classmethod
    def of(cls, table: Table, kind: Sharding, rows: int, ranks: int) -> _Shards:
        kept, width, share = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
        for extent in kind.extents(table, rows, ranks):
            some = slice(extent.ranks.start, extent.ranks.stop)
            kept[some], width[some], share[some] = extent.rows, extent.columns, 1.0
        rule = kind.owner_rule(table)
        parts = 1.0 if rule is None else width.sum() / table.dim
        if rule is not None:
            whole = (kept * width).sum() / table.dim
            share = kept / whole if whole else share / parts
        is_named = rule is _core.OwnerRule.given
        least = LEAST_IDS * parts if table.combiner in SUMMED and not is_named else np.inf
        together = not (kind.replicated or is_named)
        return cls(share, width, kept, rule is not None, kind.replicated, together, least)

    def bytes_of(self, codec: RowCodec, dtype: object) -> Floats:
        """(R,) bytes of a row in messages of or for each rank."""
        widths = self.width.astype(int)
        by_width = {w: codec.row_bytes(w, dtype) for w in set(widths.tolist()) if w}  # type: ignore[arg-type]
        return np.array([by_width.get(w, 0) for w in widths.tolist()], np.float64)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of tables on so many ranks, by what batches ask and what a machine's work takes."""

    ranks: int
    rates: Rates
    traffic: Mapping[str, Traffic]
    """Of each table, by name."""
    sizes: Sizes
    wire: tuple[str, str] = ("stored", "stored")
    """How rows and gradients travel, as `hotbed.distribute` takes it."""
    local_world_size: int | None = None
    """Ranks of a machine, as `hotbed.distribute` takes it; it divides `ranks`."""

    @functools.cached_property
    def topology(self) -> Topology:
        """Return which ranks share a machine."""
        return Topology.of(self.ranks, self.local_world_size)

    def work_of(self, table: Table, kind: Sharding) -> Work:
        """Return the work that a table makes if it is cut so."""
        traffic, rows = self.traffic[table.name], self.sizes.rows_of(table)
        shards = _Shards.of(table, kind, rows, self.ranks)
        is_pooled = traffic.bags > 0 and not traffic.is_weighted
        if is_pooled and traffic.ids >= shards.pooled_from * traffic.bags:
            return self._by_bags(table, traffic, shards)
        if shards.is_by_machine and self.topology.local > 1:
            return self._by_machine(table, traffic, shards)
        return self._by_rows(table, traffic, shards)

    def of_table(self, table: Table, kind: Sharding) -> TableCost:
        """Return the cost of a table that is cut so, without that of calls."""
        return self._priced(self.work_of(table, kind))

    def work_of_calls(self) -> Work:
        """Return the work of a step whichever tables there are."""
        named = ("forward_call", "backward_call", "step_call")
        return self._work({name: 1.0 for name in named}, {}, np.zeros(self.ranks))

    def of_calls(self) -> TableCost:
        """Return what a step costs whichever tables there are."""
        return self._priced(self.work_of_calls())

    def of_plan(self, tables: Mapping[str, Table], shardings: Mapping[str, Sharding]) -> TableCost:
        """Return the cost of a step of all tables, their rows in memory."""
        total = self.of_calls()
        for name, table in tables.items():
            total = total.plus(self.of_table(table, shardings[name]))
        return total

    def with_ssd(self, total: TableCost, on_ssd: Floats) -> TableCost:
        """Return a cost with that of rows on SSDs. `on_ssd`: (R,) share of each rank's rows that lie there,
        and so, it is assumed, of those that a step touches."""
        seconds = total.seconds.copy()
        seconds[_ANSWER, 0] += on_ssd * total.touched * self.rates.ssd_row
        return total._replace(seconds=seconds)

    def _by_rows(self, table: Table, traffic: Traffic, shards: _Shards) -> Work:
        """Each distinct id goes once to each owner; its row comes back, and its gradient goes."""
        asked, (row, gradient) = traffic.distinct * shards.share, self._row_bytes(table, shards)
        travels = {"ids": 8 * asked, "rows": asked * row, "gradients": asked * gradient}
        flows = {what: self.topology.direct(amounts) for what, amounts in travels.items()}
        work = self._work_by_rows(table, traffic, shards)
        return self._of_shards(table, traffic, shards, work, flows)

    def _row_bytes(self, table: Table, shards: _Shards) -> tuple[Floats, Floats]:
        """Return (R,) bytes of a row of each owner, and of its gradient, as they travel."""
        of_rows, of_gradients = wire_of(table, *self.wire)
        return (
            shards.bytes_of(of_rows, table.dtype),
            shards.bytes_of(of_gradients, table.compute_dtype),
        )

    def _work_by_rows(
        self, table: Table, traffic: Traffic, shards: _Shards
    ) -> dict[str, Floats | float]:
        asked, (_, gradient) = traffic.distinct * shards.share, self._row_bytes(table, shards)
        answered = asked * (1 if shards.is_replicated else self.ranks)
        vectors = float(traffic.ids * table.dim * table.compute_dtype.itemsize)
        split = traffic.distinct if shards.is_split else 0.0
        return {
            "forward_table": 1.0,
            "grouped_id": traffic.ids,
            "ordered_id": split,
            "row": answered,
            "row_byte": answered * shards.width * table.dtype.itemsize,
            "vector_byte": vectors,
            "backward_table": 1.0,
            "backward_id": traffic.ids,
            "backward_byte": vectors,
            "step_table": 1.0,
            "ordered_gradient": split,
            "written_byte": (asked * gradient).sum(),
            "gradient_row": asked * self.ranks,
            "gradient_byte": asked * self.ranks * shards.width * table.compute_dtype.itemsize,
        }

    def _by_machine(self, table: Table, traffic: Traffic, shards: _Shards) -> Work:
        """Distinct ids go to the ranks of the own machine that ask owners for them, each once; rows come back
        the same way, and gradients go it."""
        topology, asked = self.topology, traffic.distinct * shards.share
        merged = traffic.distinct_of(topology.local, table.rows) * shards.share
        row, gradient = self._row_bytes(table, shards)
        stored, summed = (shards.width * of.itemsize for of in (table.dtype, table.compute_dtype))
        answered, brought = merged * topology.machines, topology.local * asked
        work = self._work_by_rows(table, traffic, shards) | {
            "forward_table": 2.0,
            "grouped_id": traffic.ids + topology.through(brought),
            "row": answered + topology.through(brought),
            "row_byte": answered * stored + topology.through(brought * stored),
            "step_table": 2.0,
            "written_byte": (asked * summed).sum() + topology.through(merged * gradient),
            "gradient_row": answered + topology.through(brought),
            "gradient_byte": answered * summed + topology.through(brought * summed),
        }
        # Messages of ids across have room for as many as the ranks of a machine ask for together.
        across = {"ids": 8 * brought, "rows": merged * row, "gradients": merged * gradient}
        inside = {"ids": 8 * asked, "rows": asked * stored, "gradients": asked * summed}
        flows = {what: topology.across(amounts) for what, amounts in across.items()}
        flows |= {f"{what}{INSIDE}": topology.inside(amounts) for what, amounts in inside.items()}
        return self._of_shards(table, traffic, shards, work, flows)

    def _by_bags(self, table: Table, traffic: Traffic, shards: _Shards) -> Work:
        """All ids go to their owners; one vector a bag comes back, and its gradient goes."""
        codecs, owns = wire_of(table, *self.wire), shards.share > 0
        asked, bags = traffic.ids * shards.share, traffic.bags * owns
        row, gradient = (shards.bytes_of(codec, table.compute_dtype) for codec in codecs)
        size = shards.width * table.compute_dtype.itemsize
        has_lengths = traffic.has_lengths or shards.is_split
        everyone = asked * self.ranks
        work: dict[str, Floats | float] = {
            "forward_feature": traffic.features,
            "bag_row": everyone,
            "bag_byte": everyone * shards.width * table.dtype.itemsize,
            "vector_byte": float((bags * size).sum()) if not shards.is_replicated else bags * size,
            "backward_table": traffic.features,
            "backward_byte": float(traffic.bags * table.dim * table.compute_dtype.itemsize),
            "step_feature": traffic.features,
            "written_byte": (bags * gradient).sum(),
            "bag_gradient_row": everyone,
            "bag_gradient_byte": everyone * size,
        }
        travels = {
            "ids": 8 * asked + (4 * bags if has_lengths else 0),
            "vectors": bags * row,
            "gradients": bags * gradient,
        }
        flows = {what: self.topology.direct(amounts) for what, amounts in travels.items()}
        return self._of_shards(table, traffic, shards, work, flows)

    def _of_shards(
        self,
        table: Table,
        traffic: Traffic,
        shards: _Shards,
        work: Mapping[str, Floats | float],
        flows: Mapping[str, Flow],
    ) -> Work:
        """`work`: by unit, without that of updates. `flows`: by `SENT`."""
        states = self.sizes.states
        touched = traffic.distinct_of(self.ranks, table.rows) * shards.share
        in_row = shards.width * table.dtype.itemsize
        numbers = states.per_column * shards.width + states.per_row
        in_update = in_row + numbers * table.compute_dtype.itemsize
        is_cold = shards.rows * in_row > _CACHED_BYTES
        work = {
            **work,
            "updated_row": touched,
            "updated_byte": touched * in_update,
            "cold_byte": touched * in_row * is_cold,
            "cold_updated_byte": touched * in_update * is_cold,
        }
        if shards.is_replicated:  # which answers its own rank alone
            flows = {what: flow for what, flow in flows.items() if what in _TO_OWNERS}
        return self._work(work, flows, touched)

    def _work(
        self, work: Mapping[str, Floats | float], flows: Mapping[str, Flow], touched: Floats
    ) -> Work:
        units, sent = np.zeros((len(UNITS), 2, self.ranks)), np.zeros((len(SENT), self.ranks))
        for name, amount in work.items():
            units[_UNIT[name], 0] = amount
        for what, (asking, asked) in flows.items():
            kind = what.removesuffix(INSIDE)
            leaves, comes = (asking, asked) if kind in _TO_OWNERS else (asked, asking)
            at = _GRADIENT_BYTES if kind == "gradients" else _FORWARD_BYTES
            units[at, 0] += comes
            units[at, 1] += leaves
            sent[SENT.index(what)] = leaves.sum(0)
        return Work(sent, units, touched)

    def _priced(self, work: Work) -> TableCost:
        seconds = self._prices @ work.units.reshape(len(UNITS), -1)
        return TableCost(work.sent, seconds.reshape(len(PHASES), 2, -1), work.touched)

    @functools.cached_property
    def _prices(self) -> Floats:
        """(P, U) seconds of each unit, in its phase."""
        found = np.zeros((len(PHASES), len(UNITS)))
        found[PHASE_OF, np.arange(len(UNITS))] = self.rates.seconds
        return found
