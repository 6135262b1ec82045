"""The step over few wide tables, bags of 0 to 40 ids."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report import Report
from benchmarks.step import measure


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    return measure(
        Report("step-ragged", quick),
        ["sgd", "rowwise_adagrad", "adagrad"],
        2048,
        20,
        progress,
        tables=8,
        most_rows=400_000,
        dim=128,
        ragged=True,
    )
