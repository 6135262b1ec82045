"""Steps on two ranks by the plans of all named strategies and by that of predicted costs; predicted bytes and
milliseconds beside measured ones."""

from __future__ import annotations

import argparse
import collections
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as torch_dist

from benchmarks import worlds
from benchmarks.exchange import Measured, other_work
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.workload import power_law_ranks

WORLD, BATCHES = 2, 4
WARM_UP, ITERATIONS, QUICK_ITERATIONS = 4, 40, 3
OPTIMIZER, LR = "adagrad", 0.01
CHOSEN = "measured"
QUANTILE = 0.25
"""Of a plan's steps, as of those by which the machine is measured: other work makes some longer."""


class Group(NamedTuple):
    """Tables that are alike."""

    tables: int
    rows: int
    dim: int
    ids: tuple[int, ...] = (1,)
    """Ids a bag of each feature of such a table; below 0: 0 to twice as many."""
    alpha: float = 1.05
    """Exponent of the power law of ids."""


class Model(NamedTuple):
    """Tables, and the samples of a rank."""

    groups: tuple[Group, ...]
    batch: int


MODELS = {
    "clicks": Model(
        (
            Group(5, 250_000, 64),
            Group(5, 60_000, 64),
            Group(6, 5_000, 64),
            Group(10, 100, 64),
        ),
        4096,
    ),
    "synthetic tiny": Model(
        (
            Group(1, 10_000, 8, (1, 10)),
            Group(2, 250_000, 16, (1, 10)),
            Group(1, 250_000, 16),
            Group(16, 10, 8),
            Group(10, 1000, 8),
            Group(4, 10_000, 8),
            Group(2, 100_000, 16),
            Group(19, 100_000, 16),
        ),
        2048,
    ),
    "histories": Model((Group(6, 100_000, 32, (-25,)), Group(2, 20_000, 64, (50,))), 512),
    "one large": Model(
        (
            Group(1, 500_000, 128, (1,), 0.6),
            Group(3, 50_000, 128),
            Group(2, 30_000, 16, (5,)),
            Group(8, 500, 16),
        ),
        4096,
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=MODELS, action="append", help="only this one; may be repeated"
    )


def run(
    *, quick: bool, progress: Callable[[str], None], model: Sequence[str] | None = None
) -> Report:
    from hotbed.dist import Rates

    report = Report("measured-plan", quick)
    progress("measuring the machine")
    begin = time.perf_counter()
    seconds = worlds.run(WORLD, measured_rates)[0]
    report.figures["seconds of measuring"] = round(time.perf_counter() - begin, 1)
    rates = Rates.of(seconds)
    for name in model or MODELS:
        small = MODELS[name]
        small = small._replace(batch=small.batch // 8) if quick else small
        _measure(report, name, small, rates, lambda text, n=name: progress(f"{n}: {text}"))
    report.remarks += [
        f"{WORLD} processes, one thread each; a step takes as long as the slower rank takes. Adagrad.",
        "chosen over best: steps by the best named strategy over those by the measured plan. Plans that are "
        "equal run once. Ratios are of the first quartile of steps.",
        "Predicted times are those of tables, by figures measured at the start of this run.",
    ]
    return report


def measured_rates(rank: int, world: int) -> list[float]:
    import hotbed as hb

    found: list[float] = hb.dist.measure().seconds.tolist()
    return found


def _measure(
    report: Report, name: str, model: Model, rates: Any, progress: Callable[[str], None]
) -> None:
    import hotbed as hb
    from hotbed.dist.strategies import STRATEGIES

    tables, features = described(model)
    traffic = hb.dist.traffic_of(tables, batches_of(model, 0), features)
    strategy = hb.dist.Measured(rates, traffic)
    begin = time.perf_counter()
    plans = {CHOSEN: hb.plan(tables, WORLD, strategy=strategy, optimizer=OPTIMIZER)}
    report.figures[f"{name}: seconds of planning"] = round(time.perf_counter() - begin, 2)
    for one in STRATEGIES:
        made = hb.plan(tables, WORLD, strategy=one, optimizer=OPTIMIZER)
        plans[one] = hb.dist.predict(made, strategy)
    distinct = {made.digest: made.shardings for made in plans.values()}  # equal ones run once
    iterations = QUICK_ITERATIONS if report.quick else ITERATIONS
    found = worlds.run(WORLD, measure_rank, model, distinct, iterations, progress=progress)
    shape = f"{name}: {len(tables)} tables, batch {model.batch} a rank"
    fast: dict[str, float] = {}
    for one, made in plans.items():
        key = made.digest
        slower = [max(all_) for all_ in zip(*(f.ms[key, ""] for f in found), strict=True)]
        report.add(one, shape, Timing(slower, other_work([f.work[key] for f in found])))
        fast[one] = float(np.quantile(slower, QUANTILE))
        assert made.cost is not None
        of = f"{name}, {one}"
        report.ratios[f"{of}: predicted over measured step"] = made.cost.step * 1e3 / fast[one]
        sent = sum(f.figures[key] for f in found)
        report.ratios[f"{of}: predicted over sent bytes"] = float(np.sum(made.cost.sent)) / sent
    kinds = collections.Counter(kind.name for kind in plans[CHOSEN].shardings.values())
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    report.remark(f"{name}: the measured plan cuts tables so: {said}.")
    best = min(ms for one, ms in fast.items() if one != CHOSEN)
    report.ratios[f"{name}: chosen over best"] = best / fast[CHOSEN]


def described(model: Model) -> tuple[list[Any], dict[str, str]]:
    """Return the tables of a model, and the table of each feature."""
    import hotbed as hb

    tables, features = [], {}
    for g, group in enumerate(model.groups):
        for t in range(group.tables):
            name = f"g{g}t{t}"
            tables.append(hb.Table(name, dim=group.dim, rows=group.rows, combiner="sum"))
            features |= {f"{name}f{f}": name for f in range(len(group.ids))}
    return tables, features


def batches_of(model: Model, rank: int) -> list[dict[str, Any]]:
    """Return the batches of a rank, which has the same hot rows as the others."""
    import hotbed as hb

    rng = np.random.default_rng(1000 + rank)
    found: list[dict[str, Any]] = [{} for _ in range(BATCHES)]
    for g, group in enumerate(model.groups):
        for t in range(group.tables):
            order = np.random.default_rng(g * 100 + t).permutation(group.rows)
            for f, ids in enumerate(group.ids):
                for batch in found:
                    lengths = np.full(model.batch, ids)
                    if ids < 0:
                        lengths = rng.integers(0, -2 * ids + 1, model.batch)
                    drawn = power_law_ranks(rng, int(lengths.sum()), group.rows, group.alpha)
                    flat = torch.from_numpy(order[drawn])
                    batch[f"g{g}t{t}f{f}"] = (
                        flat.view(model.batch, ids)
                        if ids > 0
                        else hb.Jagged(flat, lengths=torch.from_numpy(lengths))
                    )
    return found


def measure_rank(
    rank: int, world: int, model: Model, shardings: Mapping[str, Any], iterations: int
) -> Measured:
    """All plans in turn, a step each."""
    batches, steps, measured = batches_of(model, rank), {}, Measured()
    for name, kinds in shardings.items():
        if rank == 0:
            worlds.tell(f"building {name}")
        steps[name] = Stepped(model, kinds, batches)
    for number in range(WARM_UP):
        for stepped in steps.values():
            stepped.step(number)
    for name, stepped in steps.items():
        measured.figures[name] = stepped.bytes_a_step()
    if rank == 0:
        worlds.tell("timing")
    names = list(steps)
    gc.collect()
    gc.disable()
    with OtherWork() as other:
        for number in range(iterations):
            for at in range(len(names)):  # each plan comes first, second, ... as often
                name = names[(at + number) % len(names)]
                torch_dist.barrier()
                measured.note(name, steps[name].step(number))
    for name in steps:
        measured.note_work(name, other)
    return measured


class Stepped:
    """A model on ranks, by one plan."""

    def __init__(
        self, model: Model, kinds: Mapping[str, Any], batches: list[dict[str, Any]]
    ) -> None:
        import hotbed as hb

        tables, features = described(model)
        self.model = hb.EmbeddingCollection(tables, features, seed=0)
        hb.distribute(self.model, hb.dist.Plan(tables, WORLD, kinds))
        self.optimizer = hb.optim.Adagrad(self.model.parameters(), lr=LR)
        self.batches = batches
        self.gradients = [
            torch.ones(model.batch, group.dim)
            for group in model.groups
            for _ in range(group.tables * len(group.ids))
        ]

    def step(self, number: int) -> dict[str, float]:
        """Milliseconds, by phase; "" of all."""
        marks = [time.perf_counter()]
        vectors = [*self.model(self.batches[number % BATCHES]).values()]
        marks.append(time.perf_counter())
        torch.autograd.backward(vectors, self.gradients)
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        phases = [(b - a) * 1e3 for a, b in zip(marks, marks[1:], strict=False)]
        return dict(zip(("forward", "backward", "update", ""), (*phases, sum(phases)), strict=True))

    def bytes_a_step(self) -> float:
        """Bytes that this rank sends in a step, mean over the batches."""
        ranks: Any = self.model.table(next(iter(self.model.tables))).place.ranks
        sent = ranks.sent
        before = sum(sent.values())
        for number in range(BATCHES):
            self.step(number)
        return (sum(sent.values()) - before) / BATCHES
