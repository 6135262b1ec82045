"""The step over narrow rows, one id a bag."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report import Report
from benchmarks.step import measure


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    optimizers = ["sgd", "rowwise_adagrad", "adagrad"]
    return measure(Report("step-narrow", quick), optimizers, 8192, 1, progress, dim=16)
