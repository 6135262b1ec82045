"""Timing contenders in turn, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.machine import OtherWork

WARM_UP = 4
ITERATIONS = 15
ROUNDS = 3


class Contender(Protocol):
    """One way of doing the measured work."""

    name: str

    def nbytes(self) -> int:
        """Memory it will hold between `build` and `drop`."""
        ...

    def build(self) -> None: ...

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        """Phase name to the work of one iteration, which gets the iteration's number."""
        ...

    def drop(self) -> None: ...


@dataclass
class Timing:
    """Milliseconds of each timed iteration, and the machine's share that others took meanwhile."""

    ms: list[float] = field(default_factory=list)
    other_work: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


Timings = dict[tuple[str, str], Timing]
"""(contender, phase) → timing."""


def contest(
    contenders: Sequence[Contender],
    budget: int,
    *,
    iterations: int = ITERATIONS,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda text: None,
) -> Timings:
    """Times every phase of every contender.

    Contenders that together fit into `budget` bytes are all built, and run A B C A B C ..., one
    iteration each. Otherwise they are packed, in order, into groups that fit; the groups are
    built, measured and dropped one after another, and the whole is done `rounds` times with a
    share of the iterations, so that each contender is measured early and late.
    """
    groups = pack(contenders, budget)
    turns = 1 if len(groups) == 1 else rounds
    each = -(-iterations // turns)
    timings: Timings = {}
    for turn in range(turns):
        for group in groups:
            try:
                for contender in group:
                    progress(f"round {turn + 1} of {turns}: building {contender.name}")
                    contender.build()
                _run_group(group, each, timings, progress)
            finally:
                for contender in group:
                    contender.drop()
                gc.collect()
    return timings


def pack(contenders: Sequence[Contender], budget: int) -> list[list[Contender]]:
    """Groups of consecutive contenders, each group within `budget` bytes.

    Raises:
        MemoryError: a contender alone does not fit.
    """
    groups: list[list[Contender]] = []
    room = -1
    for contender in contenders:
        need = contender.nbytes()
        if need > budget:
            raise MemoryError(
                f"{contender.name} needs {need / 1e9:.1f} GB and the benchmark may use "
                f"{budget / 1e9:.1f} GB. Run it with --quick or on a larger machine."
            )
        if need > room:
            groups.append([])
            room = budget
        groups[-1].append(contender)
        room -= need
    return groups


def _run_group(
    group: Sequence[Contender],
    iterations: int,
    timings: Timings,
    progress: Callable[[str], None],
) -> None:
    names: list[tuple[str, str]] = []
    with OtherWork() as other:  # of all phases: the machine's clock is too coarse for one
        for phase in group[0].phases():
            progress(f"{phase}: {', '.join(contender.name for contender in group)}")
            work = [(c.name, c.phases()[phase]) for c in group if phase in c.phases()]
            for i in range(WARM_UP):
                for _, run in work:
                    run(i)
            names += [(name, phase) for name, _ in work]
            gc.collect()
            gc.disable()
            try:
                for i in range(iterations):
                    for name, run in work:
                        start = time.perf_counter()
                        run(WARM_UP + i)
                        ms = (time.perf_counter() - start) * 1e3
                        timings.setdefault((name, phase), Timing()).ms.append(ms)
            finally:
                gc.enable()
    for name in names:
        timings[name].other_work = max(timings[name].other_work, other.share)
