"""The step with ten ids a bag."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report import Report
from benchmarks.step import measure


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    optimizers = ["sgd", "rowwise_adagrad", "adagrad"]
    return measure(Report("step-multihot", quick), optimizers, 2048, 10, progress)
