"""Everything on one CUDA device: kernels checked against float64, then timed under a measured roof.

Without a device, `--quick` checks the kernels in Triton's interpreter and says what it skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable

import torch

from benchmarks import (
    gpu_cache,
    gpu_checks,
    gpu_dense,
    gpu_dlrm,
    gpu_lookup,
    gpu_roof,
    gpu_synthetic,
    gpu_table_checks,
)
from benchmarks.gpu_scenarios import Run, Scenario, run_all
from benchmarks.report import Report

MINUTES = 8.0
SHARE_FOR_COMPILING = 5 / 8
"""Of the minutes: what comes later is not compiled by torch."""
KINDS = ("check", "interaction", "mlp", "lookup", "synthetic", "dlrm", "cache")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="M",
        help="no part begins that would not end by then (default: %(default)g)",
    )
    parser.add_argument(
        "--only",
        type=_kinds,
        default=KINDS,
        metavar="NAMES",
        help=f"only these parts, beside the roof: of {','.join(KINDS)}",
    )


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in KINDS:
            raise argparse.ArgumentTypeError(f"there is no {name!r}; choose of {', '.join(KINDS)}")
    return names


def run(
    *,
    quick: bool,
    progress: Callable[[str], None],
    minutes: float = MINUTES,
    only: tuple[str, ...] = KINDS,
    save: Callable[[Report], None] = lambda report: None,
) -> Report:
    start = time.monotonic()
    if importlib.util.find_spec("triton") is None:
        raise SystemExit("Triton is not installed: pip install 'hotbed[gpu]'.")
    there_is_one = torch.cuda.is_available()
    if not there_is_one and not quick:
        raise SystemExit(
            "torch sees no CUDA device. Pass --quick to check the kernels in Triton's interpreter."
        )
    one = Run(
        Report("gpu", quick),
        torch.device("cuda" if there_is_one else "cpu"),
        progress,
        deadline=start + 60 * minutes,
        compiling_until=start + 60 * minutes * SHARE_FOR_COMPILING,
    )
    parts = chosen(one, only)
    if there_is_one:
        one.report.hardware["gpu"] = gpu_roof.card()
        one.report.remark(
            "The floor is bytes over the copy bandwidth, or operations over the rate of a large "
            "product, whichever is longer, layer by layer. Launches are queued before they are timed."
        )
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel's module is imported
        one.report.remark("The kernels were checked in Triton's interpreter, at toy sizes.")
        timed = [part for part in parts if not part.name.startswith("check ")]
        one.report.skipped = {part.name: "torch sees no CUDA device" for part in timed}
        parts = [part for part in parts if part not in timed]
    run_all(one, parts, save)
    one.report.figures["seconds of the whole run"] = round(time.monotonic() - start, 1)
    return one.report


def chosen(one: Run, only: tuple[str, ...]) -> list[Scenario]:
    """All parts in their order, or those of some kinds and the roof."""
    parts = [
        Scenario("check dense kernels", _check_dense),
        Scenario("check lookup", _check_lookup),
        Scenario("check trained tables", _check_tables),
        Scenario("roof", _roof),
        Scenario("interaction", gpu_dense.interaction, seconds=10, needs_roof=True),
        Scenario("mlp", gpu_dense.mlp, seconds=20, needs_roof=True),
        Scenario("lookup", gpu_lookup.measure, seconds=15, needs_roof=True),
        *gpu_synthetic.scenarios(one.sizes),
        *gpu_dlrm.scenarios(one.sizes),
        *gpu_cache.scenarios(one.sizes),
    ]
    kinds = {"roof", *only}
    return [part for part in parts if part.name.replace(",", "").split()[0] in kinds]


def _roof(one: Run) -> None:
    one.roof, timings = gpu_roof.measure(one.report.quick, one.doing)
    for name, timing in timings.items():
        one.report.add(name, "roof", timing)
    card = one.report.hardware["gpu"]
    card["copy_gb_per_s"] = round(one.roof.copy_bytes_per_s / 1e9, 1)
    card["tflops"] = {name: round(flops / 1e12, 1) for name, flops in one.roof.flops.items()}


def _check_dense(one: Run) -> None:
    _note(one, gpu_checks.errors(one.device.type, one.report.quick, one.doing))


def _check_lookup(one: Run) -> None:
    one.doing("checking lookup")
    _note(one, gpu_lookup.check(one.device.type, one.report.quick))


def _check_tables(one: Run) -> None:
    one.doing("checking trained tables")
    _note(one, gpu_table_checks.check(one.device.type))


def _note(one: Run, errors: dict[str, float]) -> None:
    for name, error in errors.items():
        one.report.figures[f"largest error: {name}"] = float(f"{error:.3g}")
