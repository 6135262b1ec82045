"""Everything on one CUDA device: kernels checked against float64, then timed under a measured roof.

Without a device, `--quick` checks the kernels in Triton's interpreter and says what it skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from types import ModuleType

import torch

from benchmarks import gpu_checks, gpu_dense, gpu_roof
from benchmarks.report import Report

SECONDS = 8 * 60
COMPILING_SECONDS = 5 * 60
"""After this time nothing more is compiled by torch."""

# Scenarios in modules of their own: `measure(report, roof, progress)` adds rows; `check(device,
# small)`, where there is one, gives errors by name, as `gpu_checks.errors`.
OTHERS = {"gpu_lookup": ("lookup",), "gpu_models": ("synthetic", "dlrm", "cache")}


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    start = time.monotonic()
    if importlib.util.find_spec("triton") is None:
        raise SystemExit("Triton is not installed: pip install 'hotbed[gpu]'.")
    if not torch.cuda.is_available():
        if not quick:
            raise SystemExit(
                "torch sees no CUDA device. Pass --quick to check the kernels in Triton's interpreter."
            )
        return _without_device(progress)
    report = Report("gpu", quick)
    report.hardware["gpu"] = gpu_roof.card()
    others = [importlib.import_module(f"benchmarks.{name}") for name in OTHERS]
    _check(report, "cuda", quick, others, progress)

    roof, timings = gpu_roof.measure(quick, progress)
    for name, timing in timings.items():
        report.add(name, "roof", timing)
    report.hardware["gpu"]["copy_gb_per_s"] = round(roof.copy_bytes_per_s / 1e9, 1)
    report.hardware["gpu"]["tflops"] = {n: round(f / 1e12, 1) for n, f in roof.flops.items()}
    deadline = start + COMPILING_SECONDS
    before = torch.get_float32_matmul_precision()
    try:
        gpu_dense.interaction(report, roof, deadline, progress)
        gpu_dense.mlp(report, roof, deadline, progress)
    finally:
        torch.set_float32_matmul_precision(before)
    for module in others:
        module.measure(report, roof, progress)
    report.figures["seconds of the whole run"] = round(time.monotonic() - start, 1)
    report.remarks.append(
        "The floor is bytes over the copy bandwidth, or operations over the rate of a large "
        "product, whichever is longer, layer by layer. Launches are queued before they are timed."
    )
    return report


def _without_device(progress: Callable[[str], None]) -> Report:
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel's module is imported
    report = Report("gpu", True)
    others = [importlib.import_module(f"benchmarks.{name}") for name in OTHERS]
    _check(report, "cpu", True, others, progress)
    report.remarks.append(
        "torch sees no CUDA device. The kernels were checked in Triton's interpreter, at toy "
        "sizes; skipped: roof, interaction, mlp, "
        + "".join(f"{scenario}, " for names in OTHERS.values() for scenario in names)
        + "everything that has a time."
    )
    return report


def _check(
    report: Report,
    device: str,
    small: bool,
    others: list[ModuleType],
    progress: Callable[[str], None],
) -> None:
    found = gpu_checks.errors(device, small, progress)
    for module in others:
        if hasattr(module, "check"):
            found.update(module.check(device, small))
    for name, error in found.items():
        report.figures[f"largest error: {name}"] = float(f"{error:.3g}")
