"""Rows and gradients that travel as they are stored, as bfloat16 and as int8: steps over links of several
speeds, bytes, and test AUC on the Criteo log."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from benchmarks import worlds
from benchmarks.exchange import WHOLE, Measured, other_work, run_group
from benchmarks.measure import Timing
from benchmarks.peers.hotbed_ranks import HotbedRanks
from benchmarks.peers.torch_dlrm import COLUMNS
from benchmarks.report import Report
from benchmarks.scale import network as joined
from benchmarks.step import LR
from benchmarks.train import BATCH, DIM, QUICK_BATCHES, TEST_FRACTION, area_under_curve, click_log
from benchmarks.train import LR as LR_OF_MODEL
from benchmarks.workload import Workload

TABLES, ROWS, DIM_OF_STEP, WORLD = 26, 100_000, 64, 2
BAGS = {1: 4096, 20: 1024}
"""Samples of a rank by ids a bag."""
FORMS = ("stored", "bfloat16", "int8")
NETWORKS = ("loopback", "10gbit", "1gbit")
ITERATIONS, SEEDS = 20, 20
STUDENT = 2.093
"""Quantile 0.975 of Student's t with 19 degrees of freedom."""


class Encoded(HotbedRanks):
    """Tables cut by row over Gloo, both ways in one form."""

    def __init__(self, workload: Workload, form: str) -> None:
        super().__init__(workload, "rowwise_adagrad", LR["rowwise_adagrad"], "row", "gloo")
        self.form = self.name = form

    def distributed(self, embeddings: Any, plan: Any) -> Any:
        import hotbed as hb

        return hb.distribute(
            embeddings, plan, shared_memory=False, rows=self.form, gradients=self.form
        )


def add_options(parser: Any) -> None:
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of models on the Criteo log")


def run(*, quick: bool, progress: Callable[[str], None], seeds: int = SEEDS) -> Report:
    report = Report("codecs", quick)
    for bag, batch in BAGS.items():
        _steps(report, bag, 64 if quick else batch, progress)
    _scores(report, 2 if quick else seeds, progress)
    report.remarks += [
        f"{WORLD} ranks, one thread each, tables cut by row, row-wise Adagrad, over Gloo; both ways alike.",
        "Break-even: the bandwidth a direction below which int8 is the faster one, by the bytes it saves "
        "and the time that it adds on loopback.",
        "AUC: a DLRM, one pass over the log in time order on two ranks; paired by seed, 95 % of the mean.",
    ]
    return report


def _steps(report: Report, bag: int, batch: int, progress: Callable[[str], None]) -> None:
    rows = 1000 if report.quick else ROWS
    shape = f"{TABLES} x {rows:,} x {DIM_OF_STEP}, batch {batch} x {bag} a rank"
    medians: dict[tuple[str, str], float] = {}
    sent: dict[str, float] = {}
    for network in NETWORKS:
        rate = None if network == "loopback" else network
        with joined(report, WORLD, rate) as (prefix, environment):
            progress(f"{shape}, {network}")
            task = rows, bag, batch, 2 if report.quick else ITERATIONS
            found = worlds.run(WORLD, measure_rank, *task, prefix=prefix, environment=environment)
        for form in FORMS:
            slower = [max(ms) for ms in zip(*(one.ms[form, WHOLE] for one in found), strict=True)]
            timing = Timing(slower, other_work([one.work[form] for one in found]))
            report.add(form, f"{network}, {shape}", timing)
            medians[network, form] = timing.median
            if form != "stored":
                report.ratios[f"{form}, {network}: {shape}"] = (
                    medians[network, "stored"] / timing.median
                )
        sent = {form: found[0].figures[form] for form in FORMS}
    for form, size in sent.items():
        report.figures[f"{shape}: {form}, MB of rows, vectors and gradients sent by rank 0"] = (
            round(size / 1e6, 3)
        )
        report.figures[f"{shape}: {form}, share of the bytes"] = round(size / sent["stored"], 4)
    added = (medians["loopback", "int8"] - medians["loopback", "stored"]) / 1e3
    if added > 0:
        rate = (sent["stored"] - sent["int8"]) * 8 / added / 1e9
        report.figures[f"{shape}: break-even of int8, Gbit/s"] = round(rate, 2)


def measure_rank(
    rank: int, world: int, rows: int, bag: int, batch: int, iterations: int
) -> Measured:
    """The forms in turn."""
    work = Workload(TABLES, rows, DIM_OF_STEP, world * batch, bag, 1.05)
    group = [Encoded(work.share(rank, world), form) for form in FORMS]
    measured = Measured()
    for contender in group:
        contender.build()
    run_group(group, iterations, measured)
    for contender in group:
        parts = contender.bytes_sent()
        measured.figures[contender.name] = sum(n for what, n in parts.items() if what != "ids")
    return measured


# -- what a model learns -------------------------------------------------------------------------


def _scores(report: Report, seeds: int, progress: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path, source = click_log(Path(scratch), report.quick)
        found = worlds.run(
            WORLD,
            score_rank,
            str(path),
            seeds,
            report.quick,
            progress=progress,
        )[0]
    for form in FORMS[1:]:
        differences = [a - b for a, b in zip(found[form], found["stored"], strict=True)]
        mean, deviation = statistics.mean(differences), statistics.stdev(differences)
        named = f"DLRM, {source}, {seeds} seeds, {form} both ways: test AUC minus that of stored"
        report.figures[f"{named}, mean"] = round(mean, 6)
        report.figures[f"{named}, +- of the mean"] = round(
            STUDENT * deviation / math.sqrt(seeds), 6
        )
    for form in FORMS:
        report.figures[f"DLRM, {form}: mean test AUC"] = round(statistics.mean(found[form]), 5)


def score_rank(rank: int, world: int, path: str, seeds: int, quick: bool) -> dict[str, list[float]]:
    import hotbed as hb

    rows = (0, QUICK_BATCHES * BATCH) if quick else None
    training, testing = hb.data.CriteoLog(path, batch_size=BATCH, rows=rows).split(TEST_FRACTION)
    train, test = list(hb.dist.slices(training)), list(testing)
    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for seed in range(seeds):
        for form in FORMS:
            if rank == 0:
                worlds.tell(f"seed {seed + 1} of {seeds}, {form}")
            torch.manual_seed(seed)
            model = hb.models.DLRM(COLUMNS, dim=DIM, seed=seed)
            hb.distribute(model, rows=form, gradients=form)
            optimizer = hb.optim.Adam(model.parameters(), lr=LR_OF_MODEL)
            for batch in train:
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    model(batch), batch["label"]
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found[form].append(area_under_curve(model, test))
            torch_dist.barrier()
    return found
