"""How long a plan of NVIDIA's largest synthetic model takes, by strategy, and one that does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.machine import OtherWork
from benchmarks.measure import ITERATIONS, Timing
from benchmarks.report import Report
from benchmarks.synthetic_models import synthetic_model

RANKS, QUICK_RANKS = 1024, 64
SLICE = 1 << 30
"""Elements of the largest slice of columns."""


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    import hotbed as hb
    from hotbed.dist.strategies import STRATEGIES

    report = Report("plan", quick)
    ranks = QUICK_RANKS if quick else RANKS
    model = synthetic_model("tiny" if quick else "colossal")
    tables = [
        hb.Table(f"{number}.{at}", group.dim, group.rows)
        for number, group in enumerate(model.groups)
        for at in range(group.tables)
    ]

    def printed(strategy: str) -> None:
        plan = hb.plan(tables, ranks, strategy=strategy, column_slice_threshold=SLICE)
        assert str(plan) and plan.digest

    too_little = max(load.total for load in hb.plan(tables, ranks).loads) // 4

    def refused(strategy: str) -> None:
        try:
            hb.plan(tables, ranks, strategy=strategy, optimizer="adagrad", memory=too_little)
        except hb.PlanError as error:
            assert error.remedies
        else:
            raise AssertionError("it cannot fit")

    at = f"{model.name}, {model.tables:,} tables, {ranks:,} ranks"
    work = {f"{name}, printed": (printed, name) for name in STRATEGIES}
    work["auto, refused with remedies"] = (refused, "auto")
    for name, (act, strategy) in work.items():
        progress(name)
        timing = Timing()
        with OtherWork() as other:
            for repeat in range((2 if quick else ITERATIONS) + 1):
                start = time.perf_counter()
                act(strategy)
                if repeat > 0:
                    timing.ms.append((time.perf_counter() - start) * 1e3)
        timing.other_work = other.share
        report.add(name, at, timing)
    return report
