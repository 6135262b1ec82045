"""Rows of the next batch that travel while one is trained on: steps over links of several speeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from benchmarks import worlds
from benchmarks.exchange import other_work
from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.scale import network as joined
from benchmarks.workload import Workload

TABLES, ROWS, DIM, WORLD, LR = 26, 100_000, 64, 2, 0.01
HIDDEN = 256
"""Width of the dense part."""
SKEWS = {"skewed": 1.05, "uniform": 0.0}
NETWORKS = ("10gbit", "1gbit")
WITHOUT, AHEAD = "with the lookup", "ahead"
MODES = {WITHOUT: 0, AHEAD: 1}
"""`prefetch` of `hotbed.distribute`."""


class Size(NamedTuple):
    """Of a run."""

    rows: int = ROWS
    batch: int = 2048
    """Of a rank."""
    warm_up: int = 4
    steps: int = 12
    rounds: int = 6


QUICK = Size(1000, 64, 2, 3, 1)


class Scores(nn.Module):
    """A network over one vector of each table."""

    def __init__(self, rows: int) -> None:
        import hotbed as hb

        super().__init__()
        tables = [hb.Table(f"t{n}", DIM, rows) for n in range(TABLES)]
        self.embeddings = hb.EmbeddingCollection(tables, seed=0)
        torch.manual_seed(0)
        self.top = nn.Sequential(nn.Linear(TABLES * DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.embeddings({name: batch[name] for name in self.embeddings.features})
        return self.top(torch.cat([*vectors.values()], 1))[:, 0]


class Found(NamedTuple):
    """What a rank has measured, by mode."""

    ms: dict[str, list[float]]
    work: dict[str, list[tuple[float, float, float]]]
    """Seconds of `OtherWork` in each round."""
    figures: dict[str, dict[str, float]]


class _Run:
    """One model."""

    def __init__(self, size: Size, world: int, prefetch: int) -> None:
        import hotbed as hb

        self.model = Scores(size.rows)
        specs = self.model.embeddings.tables
        kinds = {name: hb.dist.RowWise() for name in specs}
        plan = hb.dist.Plan([*specs.values()], world, kinds)
        hb.distribute(self.model, plan, shared_memory=False, prefetch=prefetch)
        self.optimizer = hb.optim.Adagrad(self.model.parameters(), lr=LR)

    @property
    def sent(self) -> dict[str, int]:
        ranks: Any = self.model.embeddings.ranks
        return dict(ranks.sent)

    def round(self, batches: list[dict[str, Tensor]], warm_up: int) -> list[float]:
        """Return milliseconds of each step."""
        import hotbed as hb

        marks = []
        for batch in hb.lookahead(batches, self.model):
            marks.append(time.perf_counter())
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch["label"])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in zip(marks, marks[1:], strict=False)][warm_up:]


def batches_of(
    size: Size, alpha: float, rank: int, world: int, count: int
) -> list[dict[str, Tensor]]:
    work = Workload(TABLES, size.rows, DIM, world * size.batch, 1, alpha)
    some = slice(rank * size.batch, (rank + 1) * size.batch)
    made = []
    for of_tables in work.ids:
        batch = {f"t{t}": torch.from_numpy(ids[some].copy()) for t, ids in enumerate(of_tables)}
        made.append({**batch, "label": (batch["t0"] % 2).float()})
    return [made[at % len(made)] for at in range(count)]


def measure_rank(rank: int, world: int, size: Size, alpha: float) -> Found:
    """The modes in turn, with all ranks at the same one."""
    from hotbed.trace import Trace

    torch.set_num_threads(1)
    batches = batches_of(size, alpha, rank, world, size.warm_up + size.steps)
    runs = {mode: _Run(size, world, prefetch) for mode, prefetch in MODES.items()}
    found = Found({mode: [] for mode in runs}, {mode: [] for mode in runs}, {})
    for number in range(size.rounds):
        for mode, one in runs.items():
            worlds.tell(f"round {number + 1}, {mode}")
            torch_dist.barrier()
            with OtherWork() as other:
                found.ms[mode] += one.round(batches, size.warm_up)
            found.work[mode].append(other.seconds)
    for mode, one in runs.items():
        torch_dist.barrier()
        before = one.sent
        with Trace() as trace:
            one.round(batches, 0)
        totals = trace.totals()
        figures = {
            f"ms of '{name}' a step": round(totals[name][1] / len(batches), 2)
            for name in ("send rows", "wait for rows ahead", "send gradients")
            if name in totals
        }
        for what in ("rows", "rows ahead"):
            if what in one.sent:
                sent = one.sent[what] - before.get(what, 0)
                figures[f"MB of {what} a step"] = round(sent / len(batches) / 1e6, 3)
        found.figures[mode] = figures
    return found


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("overlap", quick)
    size = QUICK if quick else Size()
    for network in NETWORKS:
        for named, alpha in SKEWS.items():
            config = f"{network}, {TABLES} x {size.rows:,} x {DIM}, batch {size.batch}, {named}"
            progress(config)
            with joined(report, WORLD, network) as (prefix, environment):
                task = size, alpha
                found = worlds.run(
                    WORLD, measure_rank, *task, prefix=prefix, environment=environment
                )
            _add(report, config, found)
    report.remarks += [
        f"{WORLD} ranks, one training thread each, tables cut by row, one id a bag, Adagrad, over Gloo; the "
        f"dense part is {TABLES * DIM} x {HIDDEN} x 1.",
        "A ratio is the time of a step whose rows come with its lookup over that of one whose rows travel "
        "while the step before computes, in rounds that take turns; a step takes as long as the slower rank "
        "takes. Figures are of rank 0 and one more round.",
    ]
    return report


def _add(report: Report, config: str, found: list[Found]) -> None:
    medians = {}
    for mode in MODES:
        slower = [max(times) for times in zip(*(one.ms[mode] for one in found), strict=True)]
        seconds = zip(*(one.work[mode] for one in found), strict=True)
        timing = Timing(slower, max(other_work([list(of) for of in every]) for every in seconds))
        report.add(f"rows {mode}", config, timing)
        medians[mode] = timing.median
        for what, value in found[0].figures[mode].items():
            report.figures[f"{config}, rows {mode}: {what}"] = value
    report.ratios[f"{WITHOUT}/{AHEAD}: {config}"] = medians[WITHOUT] / medians[AHEAD]
