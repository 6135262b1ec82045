"""A CUDA device as a benchmark sees it: what it is, how fast it copies and multiplies, its clock."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.measure import Timing

WARM_UP, ITERATIONS = 5, 20
COPY_BYTES, QUICK_COPY_BYTES = 1 << 30, 1 << 26
SIDE, QUICK_SIDE = 8192, 1024
# Long enough for the launches of an iteration to be queued before its first kernel starts.
QUEUEING_CYCLES = 2_000_000

PRECISIONS = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "high"),
    "float16": (torch.float16, "high"),
}
"""Name → dtype and the setting of torch.set_float32_matmul_precision."""


@dataclass
class Roof:
    """What the device reaches at best, as measured."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written."""
    flops: dict[str, float] = field(default_factory=dict)
    """Multiplications and additions a second of a large square product, by precision."""

    def floor_ms(self, moved_bytes: float, flops: float = 0.0, precision: str = "") -> float:
        """The least milliseconds of work that moves and computes as much at the same time."""
        seconds = moved_bytes / self.copy_bytes_per_s
        if flops:
            seconds = max(seconds, flops / self.flops[precision])
        return seconds * 1e3


@contextmanager
def kept_precision() -> Iterator[None]:
    """torch.set_float32_matmul_precision inside holds no longer than the block."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def card() -> dict[str, Any]:
    """The device's name, driver and memory."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def timed(contenders: Mapping[str, Callable[[], object]], iterations: int) -> dict[str, Timing]:
    """Milliseconds of each contender on the device, in turn, by events on the current stream.

    Launches are queued behind a pause, so what is measured is the device's time and not Python's.
    """
    timings = {name: Timing() for name in contenders}
    for run in contenders.values():
        for _ in range(WARM_UP):
            run()
    torch.cuda.synchronize()
    for _ in range(iterations):
        events = []
        for name, run in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(QUEUEING_CYCLES)
            begin.record()
            run()
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in events:
            timings[name].ms.append(begin.elapsed_time(end))
    return timings


def measure(quick: bool, progress: Callable[[str], None]) -> tuple[Roof, dict[str, Timing]]:
    """The roof, and the timings that it comes from."""
    progress("roof: copy")
    copied = (QUICK_COPY_BYTES if quick else COPY_BYTES) // 4
    roof, timings = _copy_roof(copied)
    side = QUICK_SIDE if quick else SIDE
    for name, (dtype, setting) in PRECISIONS.items():
        progress(f"roof: product, {name}")
        a = torch.randn(side, side, device="cuda").to(dtype)
        b = torch.randn(side, side, device="cuda").to(dtype)
        with kept_precision():
            torch.set_float32_matmul_precision(setting)
            timing = timed({name: lambda a=a, b=b: torch.mm(a, b)}, ITERATIONS)[name]
        timings[f"product {name}"] = timing
        roof.flops[name] = 2 * side**3 / (timing.median / 1e3)
    return roof, timings


def _copy_roof(elements: int) -> tuple[Roof, dict[str, Timing]]:
    source = torch.ones(elements, device="cuda")
    target = torch.empty_like(source)
    timings = timed({"copy": lambda: target.copy_(source)}, ITERATIONS)
    return Roof(2 * source.nbytes / (timings["copy"].median / 1e3)), timings
