"""Finds and inserts a second in the key index of a dynamic table, on one core."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.machine import OtherWork
from benchmarks.measure import ITERATIONS, Timing
from benchmarks.report import Report

KEYS, QUICK_KEYS = 40_000_000, 2_000_000
BATCH = 1_000_000
PROBE_BYTES = 64
"""A probe of a table far larger than the caches fetches at least one cache line."""


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    from hotbed._core import KeyIndex

    report = Report("index", quick)
    total = QUICK_KEYS if quick else KEYS
    batch = min(BATCH, total // 20)
    # One batch of keys for warming up, and as many fresh ones as the timed inserts want.
    keys = distinct_keys(total + (ITERATIONS + 1) * batch)
    slots = np.empty(batch, np.int64)
    index = KeyIndex("the benchmark")

    def insert(begin: int) -> float:
        part = keys[begin : begin + batch]
        start = time.perf_counter()
        index.find_or_insert(part.ctypes.data, batch, slots.ctypes.data, begin)
        return (time.perf_counter() - start) * 1e3

    def find(part: np.ndarray) -> float:
        start = time.perf_counter()
        index.find(part.ctypes.data, batch, slots.ctypes.data)
        return (time.perf_counter() - start) * 1e3

    progress(f"inserting {total:,} keys into an empty index")
    growth = Timing()
    with OtherWork() as other:
        growth.ms = [insert(begin) for begin in range(0, total, batch)]
    growth.other_work = other.share
    bytes_a_key = index.memory_bytes() / len(index)

    rng = np.random.default_rng(1)
    present, absent = Timing(), Timing()
    wanted = [rng.integers(0, total, batch) for _ in range(ITERATIONS + 1)]
    progress("finding keys that are there, and keys that are not")
    with OtherWork() as other:
        for i, positions in enumerate(wanted):
            asked = keys[positions]
            ms = find(asked)
            if not np.array_equal(slots, positions):
                raise AssertionError("the index gave a wrong slot")
            missing = find(keys[total + i * batch : total + (i + 1) * batch])
            if not (slots == -1).all():
                raise AssertionError("the index found a key that was never inserted")
            if i > 0:
                present.ms.append(ms)
                absent.ms.append(missing)
    present.other_work = absent.other_work = other.share

    full = Timing()
    progress("inserting into the full index")
    with OtherWork() as other:
        full.ms = [insert(total + i * batch) for i in range(ITERATIONS + 1)][1:]
    full.other_work = other.share

    config = f"{total:,} keys, {batch:,} a call, one thread"
    for name, timing in (
        ("insert, growing", growth),
        ("insert", full),
        ("find", present),
        ("find absent", absent),
    ):
        report.add(name, config, timing, PROBE_BYTES * batch, threads=1)
        report.figures[f"{name}: keys a second"] = round(batch / (timing.median / 1e3))
    report.figures["insert, growing: keys a second, mean"] = round(total / (sum(growth.ms) / 1e3))
    report.figures["longest call while growing, ms"] = round(max(growth.ms), 2)
    report.figures["bytes a key"] = round(bytes_a_key, 2)
    report.remarks.append("insert, growing: from an empty index; the others at full size.")
    report.remarks.append("The floor counts one cache line a key at the copy bandwidth.")
    return report


def distinct_keys(count: int) -> np.ndarray:
    """int64 (count,): scattered over all 64 bits and distinct, by SplitMix64's bijection."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x.view(np.int64)
