"""Steps of processes on this machine, beside what the same arithmetic predicts for them."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor

from benchmarks import worlds
from benchmarks.exchange import Measured as OfRank
from benchmarks.exchange import other_work
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.measured_plan import QUANTILE, measured_rates
from benchmarks.peers.torch_dlrm import COLUMNS, DENSE
from benchmarks.report import Report
from benchmarks.scale import BOTTOM, TOP, DenseAlone
from benchmarks.simulated_assumptions import Assumptions
from benchmarks.simulated_model import IDS, ROWS
from benchmarks.workload import power_law_ranks
from hotbed.dist import Plan, Rates, predict

__all__ = ["CHECKED", "Size", "check", "longer_by", "measured_among"]

CHECKED = "predicted and measured on this machine"
TABLES, WHOLE, LAYERS, SUM = "tables", "whole model", "dense layers", "sum of dense gradients"
OPTIMIZER, LR, SKEW, BATCHES, WARM_UP = "adagrad", 0.01, 1.05, 6, 6


class Size(NamedTuple):
    """The click model as it fits here: its tables cut down, and fewer dense layers."""

    most_rows: int = 200_000
    dim: int = 64
    batch: int = 1024
    """Of a process."""
    worlds: tuple[int, ...] = (1, 2, 4)
    iterations: int = 40


QUICK = Size(2_000, 16, 64, (1, 2), 3)


def measured_among(processes: int) -> Rates:
    """Return the figures of processes of this machine, which have one thread each."""
    return Rates.of(worlds.run(processes, measured_rates)[0])


class World(NamedTuple):
    """What was measured of so many processes."""

    plan: Plan
    of_ranks: list[OfRank]
    near: list[Rates]
    """Figures of two processes, measured just before and after."""
    own: Rates | None
    """Figures of as many processes, where there are more than cores."""


def check(
    report: Report,
    assumed: Assumptions,
    size: Size,
    progress: Callable[[str], None],
    measure: Callable[[int], Rates] = measured_among,
) -> Rates:
    """Measure steps of one, two and four processes, and report what is predicted of each.

    Figures are measured before and after the steps of each number of processes, as what goes on beneath this
    machine changes them; the mean of both predictions counts. Of more processes than cores, figures measured
    among as many tell whether the arithmetic is wrong, or how they are assumed to share the cores.

    Args:
        measure: returns figures measured among so many processes.

    Returns:
        The medians of all figures that were measured among two processes.
    """
    cores = report.hardware["cores"]
    measured = _measured(report, size, cores, progress, measure)
    fast = {world: _first_quartiles(one.of_ranks) for world, one in measured.items()}
    rows: list[dict[str, Any]] = []
    for world, one in measured.items():
        _report(report, size, world, one.of_ranks)
        longer = longer_by(assumed, world, cores)
        each = [_predicted(size, one.plan, rates, longer, fast) for rates in one.near]
        rows += _lines(2, world, each, fast)
        if one.own is not None:
            tables = _predicted(size, one.plan, one.own, 1.0, fast)[TABLES]
            rows += _lines(world, world, [{TABLES: tables}], fast)
    for row in rows:
        what = f"{row['of']} of {row['processes']}, by figures of {row['figures of']}"
        report.ratios[f"{what}: predicted over measured"] = row["ratio"]
    report.tables[CHECKED] = rows
    every = [rates.seconds for one in measured.values() for rates in one.near]
    return Rates.of(np.median(every, axis=0).tolist())


def _measured(
    report: Report,
    size: Size,
    cores: int,
    progress: Callable[[str], None],
    measure: Callable[[int], Rates],
) -> dict[int, World]:
    """Measure figures and steps in turn, by number of processes."""
    shares, found = [], {}

    def figures(processes: int) -> Rates:
        progress(f"measuring figures of {processes} processes")
        with OtherWork() as other:
            rates = measure(processes)
        shares.append(other.share)
        return rates

    before = figures(2)
    for world in size.worlds:
        plan = _plan(size, world, before)
        tell = functools.partial(_tell, progress, world)
        of_ranks = worlds.run(world, measure_rank, size, plan.shardings, progress=tell)
        own = figures(world) if world > cores else None
        after = figures(2)
        found[world] = World(plan, of_ranks, [before, after], own)
        before = after
    report.figures["other work while figures were measured"] = round(max(shares), 3)
    return found


def _report(report: Report, size: Size, world: int, of_ranks: list[OfRank]) -> None:
    shape = f"{world} process{'es' * (world > 1)}, batch {size.batch} each"
    for part in (TABLES, WHOLE, LAYERS):
        share = other_work([one.work[part] for one in of_ranks])
        report.add(part, shape, Timing(_slowest(of_ranks, part), share))


def _lines(
    figures: int,
    world: int,
    predicted: list[dict[str, float]],
    fast: dict[int, dict[str, float]],
) -> list[dict[str, Any]]:
    """Lines of the table, by the mean of what is predicted. `fast`: measured, of each number of processes."""
    lines = []
    for part in predicted[0]:
        each = [one[part] for one in predicted]
        mean, measured = sum(each) / len(each), fast[world][part]
        lines.append(
            {
                "processes": world,
                "of": part,
                "figures of": figures,
                "predicted ms": round(mean, 2),
                "from": round(min(each), 2),
                "to": round(max(each), 2),
                "measured ms": round(measured, 2),
                "ratio": round(mean / measured, 2),
            }
        )
    return lines


def _tell(progress: Callable[[str], None], world: int, text: str) -> None:
    progress(f"{world} processes: {text}")


def longer_by(assumed: Assumptions, processes: int, cores: int) -> float:
    """Return how many times as long work takes where more processes than cores take turns on them."""
    return 1 + assumed["turns on cores"] * max(0.0, processes / cores - 1)


def _predicted(
    size: Size, plan: Plan, rates: Rates, longer: float, fast: dict[int, dict[str, float]]
) -> dict[str, float]:
    """Milliseconds of a step. Dense layers are those of one process, and a sum of dense gradients that of
    two: it grows as the bytes that a ring sends."""
    cost = predict(plan, _strategy(size, rates)).cost
    assert cost is not None
    tables, world = cost.step * 1e3 * longer, plan.world_size
    summed = fast.get(2, {}).get(SUM, 0.0) * 2 * (world - 1) / world * longer
    return {TABLES: tables, WHOLE: tables + fast[1][LAYERS] * longer + summed}


def _slowest(of_ranks: list[OfRank], part: str) -> list[float]:
    """Milliseconds of each step of the slowest rank."""
    return [max(step) for step in zip(*(one.ms[part, ""] for one in of_ranks), strict=True)]


def _first_quartiles(of_ranks: list[OfRank]) -> dict[str, float]:
    """As `hotbed.dist.measure` takes them: other work makes some steps longer."""
    return {
        part: float(np.quantile(_slowest(of_ranks, part), QUANTILE)) for part, _ in of_ranks[0].ms
    }


# -- the model ----------------------------------------------------------------------------------


def described(size: Size) -> list[Any]:
    """Return the tables, with at most so many rows."""
    import hotbed as hb

    return [
        hb.Table(name, dim=size.dim, rows=min(rows, size.most_rows), combiner="sum")
        for name, rows in zip(COLUMNS, ROWS, strict=True)
    ]


def batches_of(size: Size, rank: int) -> list[dict[str, Tensor]]:
    """Return the batches of a rank, which has the same hot rows as the others."""
    rng = np.random.default_rng(1000 + rank)
    found: list[dict[str, Tensor]] = []
    for _ in range(BATCHES):
        batch = {"dense": torch.from_numpy(rng.random((size.batch, DENSE), np.float32))}
        batch["label"] = torch.from_numpy(rng.random(size.batch, np.float32)).round()
        for at, (table, ids) in enumerate(zip(described(size), IDS, strict=True)):
            order = np.random.default_rng(at).permutation(table.rows)
            drawn = power_law_ranks(rng, size.batch * ids, table.rows, SKEW)
            batch[table.name] = torch.from_numpy(order[drawn]).view(size.batch, ids)
        found.append(batch)
    return found


def _strategy(size: Size, rates: Rates) -> Any:
    import hotbed as hb

    batches = [
        {n: ids for n, ids in batch.items() if n in COLUMNS} for batch in batches_of(size, 0)
    ]
    return hb.dist.Measured(rates, hb.dist.traffic_of(described(size), batches))


def _plan(size: Size, world: int, rates: Rates) -> Plan:
    import hotbed as hb

    return hb.plan(described(size), world, strategy=_strategy(size, rates), optimizer=OPTIMIZER)


# -- what each process does -----------------------------------------------------------------------


class TablesAlone:
    name = TABLES

    def __init__(self, size: Size, shardings: dict[str, Any]) -> None:
        import hotbed as hb

        tables, world = described(size), torch_dist.get_world_size()
        self.model = hb.EmbeddingCollection(tables, seed=0)
        hb.distribute(self.model, hb.dist.Plan(tables, world, shardings))
        self.optimizer = hb.optim.Adagrad(self.model.parameters(), lr=LR)
        self.gradients = [torch.ones(size.batch, size.dim) for _ in tables]

    def step(self, batch: dict[str, Tensor]) -> None:
        vectors = self.model({name: batch[name] for name in COLUMNS})
        torch.autograd.backward([*vectors.values()], self.gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()


class WholeModel:
    name = WHOLE

    def __init__(self, size: Size, shardings: dict[str, Any]) -> None:
        import hotbed as hb
        from hotbed.models import DLRM

        tables, world = described(size), torch_dist.get_world_size()
        self.model = DLRM(tables, size.dim, DENSE, (BOTTOM, size.dim), TOP, seed=0)
        hb.distribute(self.model, hb.dist.Plan(tables, world, shardings))
        self.optimizer = hb.optim.Adagrad(self.model.parameters(), lr=LR)

    def step(self, batch: dict[str, Tensor]) -> None:
        loss = torch.nn.functional.binary_cross_entropy_with_logits
        loss(self.model(batch), batch["label"]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class DenseSum:
    """The sum over processes of as many numbers as the dense layers have."""

    name = SUM

    def __init__(self, layers: torch.nn.Module) -> None:
        self.numbers = torch.zeros(sum(p.numel() for p in layers.parameters()))

    def step(self, batch: dict[str, Tensor]) -> None:
        torch_dist.all_reduce(self.numbers)


def measure_rank(rank: int, world: int, size: Size, shardings: dict[str, Any]) -> OfRank:
    """All contenders in turn, a step each."""
    if rank == 0:
        worlds.tell("building")
    batches = batches_of(size, rank)
    layers = DenseAlone(0, size.dim, linear=False)
    layers.name = LAYERS
    contenders: list[Any] = [TablesAlone(size, shardings), WholeModel(size, shardings), layers]
    contenders.append(DenseSum(layers))
    for number in range(WARM_UP):
        for one in contenders:
            one.step(batches[number % BATCHES])
    if rank == 0:
        worlds.tell("timing")
    measured = OfRank()
    gc.collect()
    gc.disable()
    with OtherWork() as other:
        for number in range(size.iterations):
            for one in contenders:
                torch_dist.barrier()
                begin = time.perf_counter()
                one.step(batches[number % BATCHES])
                measured.note(one.name, {"": (time.perf_counter() - begin) * 1e3})
    for one in contenders:
        measured.note_work(one.name, other)
    return measured
