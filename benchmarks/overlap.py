"""Rows of the next batch that travel while one is trained on: steps over links of several speeds."""

from __future__ import annotations

import itertools
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

TABLES, ROWS, DIM, LR = 26, 100_000, 64, 0.01
HIDDEN = 256
"""Width of the dense part."""
SKEWS = {"skewed": 1.05, "uniform": 0.0}
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


class Where(NamedTuple):
    """Ranks, and the machines that a link joins."""

    name: str
    trainers: int
    hosts: int = 0
    """Ranks that keep all rows, behind the others."""
    local: int = 1
    """Ranks of a machine."""
    networks: tuple[str, ...] = ("1gbit",)

    @property
    def world(self) -> int:
        return self.trainers + self.hosts


WHERE = (
    Where("two ranks", 2, networks=("10gbit", "1gbit")),
    Where("one rank, one memory host", 1, hosts=1),
    Where("two machines of two ranks", 4, local=2),
)


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
    waited: dict[str, dict[str, float]]
    """Milliseconds a step."""
    sent: dict[str, dict[str, float]]
    """MB a step."""


class _Run:
    """One model."""

    def __init__(self, rank: int, where: Where, size: Size, prefetch: int) -> None:
        import hotbed as hb

        self.model = Scores(size.rows)
        specs = self.model.embeddings.tables
        owners = tuple(range(where.trainers if where.hosts else 0, where.world))
        kinds = {name: hb.dist.RowWise(owners=owners) for name in specs}
        self.is_host = rank >= where.trainers
        hb.distribute(
            self.model,
            hb.dist.Plan([*specs.values()], where.world, kinds),
            shared_memory=where.local > 1,
            local_world_size=where.local if where.local > 1 else None,
            memory_host=self.is_host,
            prefetch=prefetch,
        )
        self.optimizer = hb.optim.Adagrad(self.model.parameters(), lr=LR)

    @property
    def sent(self) -> dict[str, int]:
        ranks: Any = self.model.embeddings.ranks
        return dict(ranks.sent)

    def round(self, batches: list[dict[str, Tensor]], warm_up: int) -> list[float]:
        """Return milliseconds of each step; none on a memory host."""
        import hotbed as hb

        marks: list[float] = []
        if self.is_host:
            hb.dist.serve_rows(self.model, self.optimizer)
            return marks
        for batch in hb.lookahead(batches, self.model):
            marks.append(time.perf_counter())
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch["label"])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        hb.dist.release_hosts(self.model)
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


def measure_rank(rank: int, world: int, where: Where, size: Size, alpha: float) -> Found:
    """The modes in turn, with all ranks at the same one."""
    from hotbed.trace import Trace

    torch.set_num_threads(1)
    batches: list[dict[str, Tensor]] = []
    if rank < where.trainers:
        batches = batches_of(size, alpha, rank, where.trainers, size.warm_up + size.steps)
    runs = {mode: _Run(rank, where, size, prefetch) for mode, prefetch in MODES.items()}
    found = Found({mode: [] for mode in runs}, {mode: [] for mode in runs}, {}, {})
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
        totals, steps = trace.totals(), size.warm_up + size.steps
        found.waited[mode] = {
            name: round(totals[name][1] / steps, 2)
            for name in ("send rows", "wait for rows ahead", "send gradients")
            if name in totals
        }
        found.sent[mode] = {
            what: (sent - before.get(what, 0)) / steps / 1e6
            for what, sent in one.sent.items()
            if what in ("rows", "rows ahead")
        }
    return found


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("overlap", quick)
    size = QUICK if quick else Size()
    for where in WHERE:
        for network, (named, alpha) in itertools.product(where.networks, SKEWS.items()):
            shape = f"{TABLES} x {size.rows:,} x {DIM}, batch {size.batch}, {named}"
            config = f"{where.name}, {network}, {shape}"
            progress(config)
            _measure(report, config, where, network, (size, alpha))
    report.remarks += [
        "One training thread a rank, tables cut by row, one id a bag, Adagrad, over Gloo, within a machine "
        f"through shared memory; the dense part is {TABLES * DIM} x {HIDDEN} x 1.",
        "A ratio is the time of a step whose rows come with its lookup over that of one whose rows travel "
        "while the step before computes, in rounds that take turns; a step takes as long as the slower rank "
        "takes. Milliseconds are of rank 0, bytes of all ranks, in one more round.",
    ]
    return report


def _measure(
    report: Report, config: str, where: Where, network: str, task: tuple[Size, float]
) -> None:
    with joined(report, where.world // where.local, network) as (prefix, environment):
        found = worlds.run(
            where.world,
            measure_rank,
            where,
            *task,
            prefix=lambda rank: prefix(rank // where.local),
            environment=environment,
        )
    medians = {}
    for mode in MODES:
        with_batches = [one.ms[mode] for one in found[: where.trainers]]
        slower = [max(times) for times in zip(*with_batches, strict=True)]
        seconds = zip(*(one.work[mode] for one in found), strict=True)
        timing = Timing(slower, max(other_work([list(of) for of in every]) for every in seconds))
        report.add(f"rows {mode}", config, timing)
        medians[mode] = timing.median
        for name, ms in found[0].waited[mode].items():
            report.figures[f"{config}, rows {mode}: ms of '{name}' a step"] = ms
        for what in found[0].sent[mode]:
            sent = sum(one.sent[mode].get(what, 0) for one in found)
            report.figures[f"{config}, rows {mode}: MB of {what} a step"] = round(sent, 3)
    report.ratios[f"{WITHOUT}/{AHEAD}: {config}"] = medians[WITHOUT] / medians[AHEAD]
