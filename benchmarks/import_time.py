"""What `import hotbed` adds to `import torch`, each time in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.machine import OtherWork
from benchmarks.measure import ITERATIONS, Timing
from benchmarks.report import Report

CODE = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import hotbed
print(middle - start, time.perf_counter() - middle)
"""


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("import", quick)
    torch_ms, hotbed_ms = Timing(), Timing()
    processes = 3 if quick else ITERATIONS
    for i in range(processes + 1):
        progress(f"process {i + 1} of {processes + 1}")
        # The child's own time counts as this process's once it has ended.
        with OtherWork() as other:
            done = subprocess.run(
                [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
            )
        if i == 0:  # reads the files from disk
            continue
        for timing, seconds in zip((torch_ms, hotbed_ms), done.stdout.split(), strict=True):
            timing.ms.append(float(seconds) * 1e3)
            timing.other_work = max(timing.other_work, other.share)
    report.add("import torch", "fresh process, files in the page cache", torch_ms)
    report.add("import hotbed after torch", "fresh process, files in the page cache", hotbed_ms)
    report.ratios["hotbed/import torch"] = hotbed_ms.median / torch_ms.median
    report.remarks.append("hotbed/import torch: what hotbed adds, over what torch takes.")
    return report
