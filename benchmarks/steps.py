"""Timing training steps one after the other, on a CPU or a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.machine import OtherWork
from benchmarks.measure import Timing

__all__ = ["default_device", "timed_steps"]


def default_device() -> torch.device:
    """A CUDA device where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def timed_steps(
    step: Callable[[Any], object],
    batches: Iterable[Any],
    device: torch.device,
    warm_up: int,
    steps: int,
) -> Timing:
    """Milliseconds from the end of each step to the end of the next, after the warm-up.

    On a CUDA device ends are events on its stream, so the host never waits for one: what is measured
    is how fast steps follow each other, whichever of the two is slower.
    """
    clock = _Events() if device.type == "cuda" else _WallClock()
    with OtherWork() as other:
        for done, batch in enumerate(batches, 1):
            step(batch)
            if done >= warm_up:
                clock.mark()
            if done == warm_up + steps:
                break
        timing = Timing(clock.milliseconds())
    if len(timing.ms) != steps:
        raise ValueError(f"{warm_up + steps} batches are needed, {len(timing.ms) + warm_up} came.")
    timing.other_work = other.share
    return timing


class _WallClock:
    def __init__(self) -> None:
        self.marks: list[float] = []

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]


class _Events:
    def __init__(self) -> None:
        self.marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def milliseconds(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) for a, b in pairs]
