"""A training step of a click model on 8 to 1,024 GPUs, predicted; and what the same arithmetic predicts of
processes on this machine, beside what they take.

Nothing of this has run on a cluster. Who keeps which table, what is sent and what each phase takes comes from
the planner of `hb.plan`; its seconds a unit of work come from a table of assumptions, each with its source.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hotbed as hb
from benchmarks.report import Report
from benchmarks.simulated_assumptions import (
    ASSUMED,
    MODEL,
    NETWORKS,
    AssumptionError,
    Assumptions,
    host_lines,
)
from benchmarks.simulated_cluster import Cluster, Predicted, predicted
from benchmarks.simulated_model import tables_of, traffic_of
from benchmarks.simulated_worlds import QUICK, Size, check
from hotbed.dist import Rates

GPUS, QUICK_GPUS = (8, 16, 32, 64, 128, 256, 512, 1024), (8, 64)
PREDICTED, PHASES, PLANS = "predicted steps", "milliseconds of phases", "plans of these steps"
HALVED, BESIDE, ASSUMPTIONS = "what is assumed, halved", "beside published ones", "assumptions"
LEAST_CHANGE = 0.01
"""Of a step, by which halving a value changes it, for the value to be named."""
PUBLISHED = {8: (55_296, 13.8), 128: (135_168, 67.7)}
"""GPUs → samples a batch of all, and million samples a second: HugeCTR on H100, MLPerf Training."""

HELP = """\
What you get:
  For each number of GPUs: the step; "links", what it would be shorter if links and messages took no time; MB
  that a rank sends for tables, and that it gets in handshakes; samples a second; and efficiency: samples a
  second of a GPU over those with the fewest GPUs. The batch of a GPU stays the same. Then the milliseconds of
  the planner's phases (ask, answer, receive, send gradients, update), of the dense layers and of the sum of
  their gradients; which assumptions matter; and each of them with its source. "assumed" means that nobody has
  published or measured it.

  The check: the planner's figures are measured here (hb.dist.measure()), and with them the same arithmetic
  predicts steps of 1, 2 and 4 processes of this machine, which then are measured.

Change what you doubt, in the unit of its line, as often as you like:
  python -m benchmarks simulate --no-check
  python -m benchmarks simulate --no-check --gpus 8 64 512 --set "InfiniBand NIC=25"
  python -m benchmarks simulate --no-check --set "host work not hidden=0" --set "batch=16384"
  python -m benchmarks simulate --no-check --set "rows=20" --set "rows travel as=bfloat16"

Figures of the host's work come from the check, from --rates FILE (which `hotbed plan --measure --rates FILE`
writes), or are the defaults of hb.dist.Rates.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="default: 8, 16, ... 1024")
    parser.add_argument("--network", choices=NETWORKS, help="between machines; default: both")
    parser.add_argument(
        "--set", action="append", metavar="NAME=VALUE", dest="changes", help="another assumption"
    )
    parser.add_argument(
        "--no-check", action="store_false", dest="checks", help="arithmetic alone, within seconds"
    )
    parser.add_argument("--rates", type=Path, metavar="FILE", help="figures of the host's work")


def run(
    *,
    quick: bool,
    progress: Callable[[str], None],
    gpus: Sequence[int] | None = None,
    network: str | None = None,
    changes: Sequence[str] | None = None,
    checks: bool = True,
    rates: Path | None = None,
) -> Report:
    try:
        return _run(quick, progress, gpus, network, changes or (), checks, rates)
    except (AssumptionError, hb.errors.HotbedError) as error:
        raise SystemExit(str(error)) from None


def _run(
    quick: bool,
    progress: Callable[[str], None],
    gpus: Sequence[int] | None,
    network: str | None,
    changes: Sequence[str],
    checks: bool,
    rates: Path | None,
) -> Report:
    assumed = Assumptions().parsed(changes)  # a wrong name is said before anything is measured
    report = Report("simulate", quick)
    host = Rates() if rates is None else Rates.read(rates)
    if rates is not None:
        assumed = assumed.with_lines(host_lines(host, f"measured: {rates.name}"))
    if checks and quick:
        check(report, assumed, QUICK, progress, lambda processes: host)
    elif checks:
        measured = check(report, assumed, Size(), progress)
        if rates is None:
            said = f"measured: hotbed.dist.measure() on this machine, {report.hardware['cpu']}"
            assumed = assumed.with_lines(host_lines(measured, said))
    assumed = assumed.parsed(changes)  # which go before what was measured
    counts = tuple(sorted(gpus or (QUICK_GPUS if quick else GPUS)))
    found = {
        name: _steps(assumed, counts, name, progress)
        for name in ([network] if network else NETWORKS)
    }
    report.tables |= tables_about(found)
    largest = next(iter(found.values()))[-1]
    report.tables[HALVED] = halved(largest)
    if not changes and not quick:
        report.tables[BESIDE] = beside_published(assumed)
    report.tables[ASSUMPTIONS] = [
        {"assumption": line.name, "value": line.value, "unit": line.unit, "source": line.source}
        for line in assumed.lines.values()
    ]
    _remark(report, assumed, largest)
    return report


def _steps(
    assumed: Assumptions, counts: Sequence[int], network: str, progress: Callable[[str], None]
) -> list[Predicted]:
    steps = []
    for count in counts:
        if count < 1:
            raise AssumptionError(f"--gpus: expected numbers from 1 on, got {count}.")
        progress(f"{count} GPUs, {network}")
        steps.append(predicted(Cluster(assumed, count, network)))
    return steps


def tables_about(found: Mapping[str, Sequence[Predicted]]) -> dict[str, list[dict[str, Any]]]:
    """Return tables of the steps of each network; efficiency is told against the first of them."""
    made: dict[str, list[dict[str, Any]]] = {}
    for network, steps in found.items():
        made[f"{PREDICTED}, {network}"] = [
            {
                "GPUs": step.cluster.gpus,
                "step ms": round(step.step * 1e3, 2),
                "links ms": round(step.links * 1e3, 2),
                "sent MB": round(step.sent / 1e6, 1),
                "handshake MB": round(step.handshake / 1e6, 1),
                "M samples/s": round(step.samples_a_second / 1e6, 2),
                "efficiency": round(step.efficiency(steps[0]), 3),
            }
            for step in steps
        ]
        made[f"{PHASES}, {network}"] = [
            {
                "GPUs": step.cluster.gpus,
                **{phase: round(s * 1e3, 2) for phase, s in step.phases.items()},
            }
            for step in steps
        ]
    made[PLANS] = [
        {"network": network, "GPUs": step.cluster.gpus, "tables cut by": step.kinds}
        for network, steps in found.items()
        for step in steps
    ]
    return made


def halved(step: Predicted) -> list[dict[str, Any]]:
    """Return how much longer a step takes, by the same plan, with half of each value that is assumed of GPUs,
    links and hosts."""
    changes = {}
    for line in step.cluster.assumed.lines.values():
        is_of_model = any(line.name == other.name for other in MODEL)
        if isinstance(line.value, str) or is_of_model or not line.source.startswith(ASSUMED):
            continue
        if line.value:
            assumed = step.cluster.assumed.changed(line.name, line.value / 2)
            cluster = dataclasses.replace(step.cluster, assumed=assumed)
            changes[line.name] = predicted(cluster, step.plan).step / step.step - 1
    order = sorted(changes, key=lambda name: -abs(changes[name]))
    return [
        {"half of": name, f"step on {step.cluster.gpus:,} GPUs": f"{changes[name]:+.1%}"}
        for name in order
        if abs(changes[name]) >= LEAST_CHANGE
    ]


def beside_published(assumed: Assumptions) -> list[dict[str, Any]]:
    """Return predictions for the batches of which another library's samples a second are published."""
    lines = []
    for count, (batch, millions) in PUBLISHED.items():
        step = predicted(Cluster(assumed.changed("batch", batch / count), count))
        ours = step.samples_a_second / 1e6
        lines.append(
            {
                "GPUs": count,
                "batch of all": batch,
                "M samples/s": round(ours, 1),
                "of HugeCTR, published": millions,
                "ratio": round(ours / millions, 2),
            }
        )
    return lines


def _remark(report: Report, assumed: Assumptions, largest: Predicted) -> None:
    report.remarks += [
        "Predicted steps have not run anywhere: tables of ranks lie on hosts so far, and ranks talk by Gloo.",
        "A step is the sum over phases of what the slowest rank takes; nothing overlaps, but bytes that come "
        "and go. Weak scaling: the batch of a GPU stays the same.",
        f"{sum(line.source.startswith(ASSUMED) for line in assumed.lines.values())} of "
        f"{len(assumed.lines)} lines are assumed.",
        "HugeCTR's figures are computed from its logs of MLPerf Training; how it overlaps phases, and in "
        "which precision it computes and sends, is not in the arithmetic.",
    ]
    own = own_plan(largest)
    report.ratios[
        f"{largest.cluster.gpus} GPUs: step of tables by hb.plan over the shortest found"
    ] = own
    if largest.below:
        report.remark(f"With the most GPUs, {largest.below:.0%} of the rows lie in host memory.")
    if report.rows:
        cores = report.hardware["cores"]
        report.remark(
            f"Measured processes have one thread each, on {cores} cores; ratios are of first quartiles."
        )


def own_plan(step: Predicted) -> float:
    """Return the step of tables by `hb.plan` alone over that of the plan that was found with more starts."""
    cluster = step.cluster
    traffic = traffic_of(cluster.assumed, cluster.gpus)
    strategy = cluster.measured(cluster.rates(below=step.below), traffic)
    optimizer = cluster.assumed.text("optimizer")
    alone = hb.plan(
        tables_of(cluster.assumed), cluster.gpus, strategy=strategy, optimizer=optimizer
    ).cost
    found = hb.dist.predict(step.plan, strategy).cost
    assert found is not None and alone is not None
    return alone.step / found.step
