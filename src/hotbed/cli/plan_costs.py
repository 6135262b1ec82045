"""Predicted costs for `hotbed plan`: figures of a machine, and a sample of data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hotbed.data import Schema
    from hotbed.dist import Measured, Plan, Rates, Traffic
    from hotbed.tables import Table
    from hotbed.train.run_plan import PlanOfRun

__all__ = ["Figures", "better_than", "measured_of", "run_of", "schema_of"]

_BATCHES = 16
"""Batches of a rank that are counted."""
_SHORTER = 0.95
"""A plan takes at most this part of the predicted step of a run's own, to be proposed."""


class Figures(Protocol):
    """Options of predicted costs."""

    @property
    def from_(self) -> str | None: ...
    @property
    def measure(self) -> bool: ...
    @property
    def rates(self) -> str | None: ...
    @property
    def data(self) -> tuple[str, ...]: ...
    @property
    def schema(self) -> str | None: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_world_size(self) -> int | None: ...


def run_of(asked: Figures) -> PlanOfRun | None:
    """Return the plan of the run that --from names, if it does.

    Raises:
        RunError: there is no record of a run on several ranks.
    """
    from hotbed.train.run_files import read_record
    from hotbed.train.run_plan import read_plan

    return None if asked.from_ is None else read_plan(read_record(asked.from_), asked.from_)


def better_than(run: PlanOfRun, made: Plan, measured: Measured) -> tuple[Plan, str]:
    """Return the plan `made`, or that of a run where no step of `made` is 5 % shorter; and a sentence."""
    from hotbed.dist import Plan, predict

    of_run = Plan(
        run.plan.tables.values(),
        run.plan.world_size,
        run.plan.shardings,
        sizes=made.sizes,
        tiers=made.tiers,
    )
    before = predict(of_run, measured)
    assert made.cost is not None and before.cost is not None
    took, takes = before.cost.step, made.cost.step
    if takes <= _SHORTER * took or any(before.missing):
        return made, (
            f"By the plan of the run a step is predicted to take {took * 1e3:.2f} ms, by this one "
            f"{takes * 1e3:.2f}, {1 - takes / took:.0%} less."
        )
    return before, "This is the plan of the run: no other is predicted to be 5 % faster."


def measured_of(
    asked: Figures, tables: Sequence[Table], run: PlanOfRun | None = None
) -> Measured | None:
    """Return the strategy by predicted costs, if figures are asked for; --measure takes some seconds, and so
    does a `run` without --rates.

    Raises:
        ConfigError: options that contradict each other.
        HotbedError, OSError: data, a schema or figures cannot be read.
    """
    from hotbed.cli.config import ConfigError
    from hotbed.dist import Measured

    if not asked.measure and asked.rates is None and run is None:
        if asked.data:
            raise ConfigError(
                "--data is a sample for predicted steps; give --measure, or --rates FILE, too."
            )
        return None
    traffic = _traffic(asked, tables)  # which is read first, as it may be wrong
    if run is not None and not asked.data:
        traffic = run.traffic
    return Measured(_rates(asked), traffic, local_world_size=asked.local_world_size)


def schema_of(asked: Figures) -> Schema | None:
    """Return the schema of the data, if one is named."""
    from hotbed.data import Schema

    return None if asked.schema is None else Schema.read(asked.schema)


def _rates(asked: Figures) -> Rates:
    from hotbed.dist import Rates, measure

    if asked.rates is not None and not asked.measure:
        return Rates.read(asked.rates)
    found = measure()
    if asked.rates is not None:
        found.write(asked.rates)
    return found


def _traffic(asked: Figures, tables: Sequence[Table]) -> Mapping[str, Traffic]:
    from hotbed.cli.config import ConfigError
    from hotbed.data import ColumnFiles, CriteoLog
    from hotbed.dist import traffic_of

    if not asked.data:
        return {}
    if asked.batch_size < asked.world_size:
        raise ConfigError(
            f"--batch-size {asked.batch_size} of all ranks leaves some of the {asked.world_size} none."
        )
    of_rank, schema = asked.batch_size // asked.world_size, schema_of(asked)
    batches: Iterable[Mapping[str, object]]
    features = None
    if schema is None:
        batches = CriteoLog(asked.data, of_rank, labels="auto")
    else:
        batches = ColumnFiles(asked.data, schema, of_rank, labels="auto")
        known = {table.name for table in tables}
        features = {name: table for name, table in schema.features.items() if table in known}
    return traffic_of(tables, itertools.islice(_full(batches, of_rank), _BATCHES), features)


def _full(batches: Iterable[Mapping[str, object]], samples: int) -> Iterator[Mapping[str, object]]:
    """Yield the first batch, and later ones of as many samples."""
    for number, batch in enumerate(batches):
        some = batch.get("label", batch.get("dense"))
        if number == 0 or not hasattr(some, "__len__") or len(some) == samples:
            yield batch
