"""One training step of tables that two processes share, by phase: Hotbed, TorchRec and gathered gradients."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as torch_dist

from benchmarks import worlds
from benchmarks.machine import OtherWork, available_bytes
from benchmarks.measure import Contender, Timing, pack
from benchmarks.peers.gathered_bags import DdpBags, GatheredBags
from benchmarks.peers.gloo_bytes import GlooBytes, everyones
from benchmarks.peers.hotbed_ranks import HotbedAlone, HotbedRanks
from benchmarks.peers.torchrec_tables import TorchRec
from benchmarks.report import Report
from benchmarks.step import LR, SHARE_OF_MEMORY
from benchmarks.workload import BATCHES, Workload

TABLES, ROWS, DIM, BATCH = 26, 250_000, 64, 4096
QUICK_ROWS = 10_000
WORLD = 2
ITERATIONS, ROUNDS, QUICK_ITERATIONS = 60, 3, 6
OPTIMIZERS = ("rowwise_adagrad", "adagrad")
HOW = ("table", "row")
PHASES = {"forward": "forward", "backward": "backward", "step": "update"}
WHOLE = "training step"


@dataclass
class Measured:
    """What a rank has measured with one optimizer."""

    ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By contender and phase; of the whole step, too."""
    work: dict[str, list[float]] = field(default_factory=dict)
    """By contender: seconds in which the machine's cores were busy, in all, and busy for this rank."""
    figures: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, ms: Mapping[str, float]) -> None:
        """One step of a contender, by phase."""
        for phase, value in ms.items():
            self.ms.setdefault((name, phase), []).append(value)

    def add(self, more: Measured) -> None:
        """Of other contenders."""
        self.ms |= more.ms
        self.work |= more.work
        self.figures |= more.figures

    def note_work(self, name: str, other: OtherWork) -> None:
        """What went on while it took its steps in turn with others: the machine's clock is too coarse for
        one step."""
        sums = self.work.setdefault(name, [0.0, 0.0, 0.0])
        for at, seconds in enumerate(other.seconds):
            sums[at] += seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, action="append", help="only this one; may be repeated"
    )


def run(
    *,
    quick: bool,
    progress: Callable[[str], None],
    optimizer: Sequence[str] | None = None,
) -> Report:
    report = Report("exchange", quick)
    rows = QUICK_ROWS if quick else ROWS
    budget = int(available_bytes() * SHARE_OF_MEMORY)
    for name in optimizer or OPTIMIZERS:
        found = [Measured() for _ in range(WORLD)]
        for some in (contenders, crashing):
            task = some, name, rows, budget, QUICK_ITERATIONS if quick else ITERATIONS
            tell = functools.partial(_tell, progress, name)
            try:
                of_ranks = worlds.run(WORLD, measure_rank, *task, progress=tell)
            except RuntimeError as error:
                if some is contenders:
                    raise
                report.remark(f"{name}: torch, DDP has crashed ({str(error).splitlines()[-1]})")
                continue
            for measured, more in zip(found, of_ranks, strict=True):
                measured.add(more)
        _report(report, name, rows, found)
    report.remarks += [
        f"{WORLD} processes, one thread each; a phase takes as long as the slower rank takes. Ids follow a "
        "power law with exponent 1.05, and both ranks have the same hot rows.",
        "Ids a second: all ids of both ranks, repeated ones too, by the time of a training step.",
        "hotbed: rows go through memory that both processes see; over gloo: as between machines.",
        "hotbed, one process: both ranks at once, each with whole tables of its own and its own samples.",
        "gloo: all_to_all_single of the bytes that Hotbed sends, and nothing else.",
        "TorchRec and FBGEMM update tables in backward; TorchRec's ids are concatenated beforehand.",
    ]
    for name in optimizer or OPTIMIZERS:
        for kind in (TorchRec, DdpBags):
            if reason := kind.lacks(name):
                report.remark(f"Not measured: {reason}.")
    return report


def _report(report: Report, optimizer: str, rows: int, found: list[Measured]) -> None:
    shape = f"{TABLES} x {rows:,} x {DIM}, batch {WORLD} x {BATCH} x 1"
    medians: dict[str, float] = {}
    for phase, label in [*PHASES.items(), (WHOLE, WHOLE)]:
        for name in found[0].work:
            if (name, phase) not in found[0].ms:
                continue
            slower = [max(every) for every in zip(*(f.ms[name, phase] for f in found), strict=True)]
            timing = Timing(slower, other_work([f.work[name] for f in found]))
            report.add(name, f"{optimizer}, {label}, {shape}", timing)
            if phase == WHOLE:
                medians[name] = timing.median
    ids = WORLD * TABLES * BATCH
    for name, median in medians.items():
        if not name.startswith("gloo"):
            report.figures[f"{optimizer}, {name}: ids a second"] = round(ids / median * 1e3)
    for how, wire in itertools.product(HOW, ("", " over gloo")):
        own = medians[f"hotbed{wire}, {how}-wise"]
        peers = {f"torchrec, {how}-wise": "torchrec", "hotbed, one process": "one process"}
        for name, short in {**peers, f"gloo, {how}-wise bytes": "gloo"}.items():
            if name in medians:
                report.ratios[f"{short}/{optimizer}/{how}-wise{wire}"] = medians[name] / own
        gathered = [ms for name, ms in medians.items() if name.startswith("torch, ")]
        if gathered:
            report.ratios[f"torch/{optimizer}/{how}-wise{wire}"] = min(gathered) / own
    for what, value in found[0].figures.items():
        report.figures[f"{optimizer}, {what}"] = value


def other_work(of_ranks: list[list[float]]) -> float:
    """The share of the machine that no rank took. `of_ranks`: as in `Measured.work`."""
    busy, total, _ = of_ranks[0]
    return max(0.0, busy - sum(own for _, _, own in of_ranks)) / total if total else 0.0


def _tell(progress: Callable[[str], None], optimizer: str, text: str) -> None:
    progress(f"{optimizer}, {text}")


# -- what each rank does -------------------------------------------------------------------------


def contenders(work: Workload, optimizer: str) -> list[Contender]:
    """All that know the optimizer; `work` is this rank's."""
    lr = LR[optimizer]
    found: list[Contender] = []
    for how in HOW:
        model = HotbedRanks(work, optimizer, lr, how)
        found += [model, HotbedRanks(work, optimizer, lr, how, "gloo"), GlooBytes(model)]
    if not TorchRec.lacks(optimizer):
        found += [TorchRec(work, optimizer, lr, how) for how in HOW]
    found.append(HotbedAlone(work, optimizer, lr))
    if not GatheredBags.lacks(optimizer):
        found.append(GatheredBags(work, optimizer, lr))
    return found


def crashing(work: Workload, optimizer: str) -> list[Contender]:
    """Those that may end their process: DDP with sparse gradients over Gloo corrupts its heap now and then
    (torch 2.13)."""
    return [] if DdpBags.lacks(optimizer) else [DdpBags(work, optimizer, LR[optimizer])]


def measure_rank(
    rank: int,
    world: int,
    some: Callable[[Workload, str], list[Contender]],
    optimizer: str,
    rows: int,
    budget: int,
    iterations: int,
) -> Measured:
    """Those of `some` in turn, as in `benchmarks.measure.contest`, with all ranks at the same one."""
    work = Workload(TABLES, rows, DIM, world * BATCH, 1).share(rank, world)
    groups = pack(some(work, optimizer), budget)
    rounds = 1 if len(groups) == 1 else ROUNDS
    measured = Measured()
    for number in range(rounds):
        for group in groups:
            try:
                for contender in group:
                    if rank == 0:
                        worlds.tell(f"round {number + 1} of {rounds}: building {contender.name}")
                    contender.build()
                if rank == 0:
                    worlds.tell(
                        f"round {number + 1} of {rounds}: {', '.join(c.name for c in group)}"
                    )
                run_group(group, -(-iterations // rounds), measured)
                if number == 0:
                    _add_figures(group, measured)
            finally:
                for contender in reversed(group):
                    contender.drop()
                gc.collect()
    return measured


def run_group(group: Sequence[Contender], iterations: int, measured: Measured) -> None:
    for i in range(BATCHES):
        for contender in group:
            _timed_step(contender.phases(), i)
    gc.collect()
    gc.disable()
    with OtherWork() as other:
        for i in range(iterations):
            for contender in group:
                measured.note(contender.name, _timed_step(contender.phases(), i))
    for contender in group:
        measured.note_work(contender.name, other)
    gc.enable()


def _timed_step(phases: Mapping[str, Callable[[int], object]], i: int) -> dict[str, float]:
    """Milliseconds of each phase of this rank, after all ranks have met."""
    torch_dist.barrier()
    marks = [time.perf_counter()]
    for phase in phases.values():
        phase(i)
        marks.append(time.perf_counter())
    found = {name: (b - a) * 1e3 for name, a, b in zip(phases, marks, marks[1:], strict=False)}
    return {**found, WHOLE: (marks[-1] - marks[0]) * 1e3}


def _add_figures(group: Sequence[Contender], measured: Measured) -> None:
    """Of Hotbed: bytes, messages, and the part before the first one."""
    for contender in group:
        if isinstance(contender, HotbedRanks):
            for what, value in _figures(contender).items():
                measured.figures[f"{contender.name}: {what}"] = value


def _figures(model: HotbedRanks) -> dict[str, float]:
    every = everyones(model.bytes_sent())
    sent = {what: sum(of_rank[what] for of_rank in every) for what in every[0]}
    least = sum(of_rank["least"] for of_rank in everyones({"least": model.least_bytes()}))
    messages = model.messages(2 * BATCHES)
    ids = model.workload.tables * model.workload.batch
    before = messages.pop("until the first message")
    found: dict[str, Any] = {
        **{f"MB of {what} sent by both ranks": round(n / 1e6, 3) for what, n in sent.items()},
        "bytes sent over the least": round(sum(sent.values()) / least, 4),
        "ms until the first message": round(before, 2),
        "million ids a second and core until the first message": round(ids / before / 1e3, 2),
        "handshakes": messages.pop("handshakes"),
    }
    return {**found, **{f"ms in messages, {what}": round(ms, 2) for what, ms in messages.items()}}
