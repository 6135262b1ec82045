"""What many small tables take of memory, and how long the first step takes beside later ones.

Each number of tables, and each first step, has a fresh process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.machine import OtherWork
from benchmarks.measure import Timing
from benchmarks.report import Report

TABLES = (1, 10, 100, 400, 1000, 2000)
ROWS, DIM = 230, 16
BUDGET = 100_000_000  # of RAM over an SSD
STEPPED, LATER = 26, 8
BATCHES = (256, 4096)
PROCESSES = 5
DYNAMIC = {"static": False, "dynamic": True}

MEMORY = """
import gc, json, sys, tempfile, torch, hotbed as hb
tables, rows, dim, dynamic, budget = json.loads(sys.argv[1])
folder = tempfile.TemporaryDirectory()

def resident():
    gc.collect()
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("Rss:")))

def made(count, name):
    storage = hb.Storage(host=budget, ssd=f"{folder.name}/{name}") if budget else None
    made = [hb.Table(f"t{k}", dim, None if dynamic else rows) for k in range(count)]
    embeddings = hb.EmbeddingCollection(made, storage=storage)
    optimizer = hb.optim.Adam(embeddings.parameters())
    for ids in torch.arange(rows).split(10):
        vectors = list(embeddings(dict.fromkeys(embeddings.features, ids)).values())
        torch.autograd.backward(vectors, [torch.ones_like(v) for v in vectors])
        optimizer.step()
        optimizer.zero_grad()
    return embeddings, optimizer

made(1, "other")
before = resident()
embeddings, optimizer = made(tables, "this")
counted = sum(table["total"] for table in embeddings.memory().values())
print(json.dumps([resident() - before, counted]))
"""

STEPS = """
import json, sys, time, torch, hotbed as hb
tables, batch, dim, steps, dynamic = json.loads(sys.argv[1])
rows = None if dynamic else batch * steps
embeddings = hb.EmbeddingCollection([hb.Table(f"t{k}", dim, rows) for k in range(tables)])
optimizer = hb.optim.Adam(embeddings.parameters())
order = torch.randperm(batch * steps)
grads = [torch.ones(batch, dim) for _ in range(tables)]
took = []
for ids in order.split(batch):
    start = time.perf_counter()
    vectors = list(embeddings(dict.fromkeys(embeddings.features, ids)).values())
    torch.autograd.backward(vectors, grads)
    optimizer.step()
    optimizer.zero_grad()
    took.append((time.perf_counter() - start) * 1e3)
print(json.dumps(took))
"""


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("many-tables", quick)
    for kind, dynamic in DYNAMIC.items():
        for budget in (0, BUDGET):
            named = f"{kind} with an SSD" if budget else kind
            for tables in TABLES[:3] if quick else TABLES:
                progress(f"memory of {tables:,} tables, {named}")
                grown, counted = _in_process(MEMORY, [tables, ROWS, DIM, dynamic, budget])
                report.figures[f"{tables:,} {named}: MB that the process grew by"] = grown / 1e6
                report.figures[f"{tables:,} {named}: MB that memory() says"] = counted / 1e6
        for batch in BATCHES[:1] if quick else BATCHES:
            _first_steps(report, kind, batch, 2 if quick else PROCESSES, progress)
    report.remarks.append(
        f"Memory: tables of {ROWS} x {DIM}, trained with Adam; resident memory of the process, "
        "with Python's and torch's objects. Over an SSD they have 100 MB of RAM and all rows fit."
    )
    report.remarks.append(
        "first/later: the first step of a fresh process over the median of those that follow; ids "
        "of each are all new."
    )
    return report


def _first_steps(
    report: Report, kind: str, batch: int, processes: int, progress: Callable[[str], None]
) -> None:
    first, later = Timing(), Timing()
    for k in range(processes):
        progress(f"first step, {kind}, batch {batch:,}: process {k + 1} of {processes}")
        with OtherWork() as other:
            took = _in_process(STEPS, [STEPPED, batch, DIM, 1 + LATER, DYNAMIC[kind]])
        first.ms.append(took[0])
        later.ms.append(statistics.median(took[1:]))
        for timing in (first, later):
            timing.other_work = max(timing.other_work, other.share)
    config = f"Adam, {STEPPED} {kind} tables, dim {DIM}, {batch:,} new ids in each a step"
    report.add("first step", config, first)
    report.add("later step", config, later)
    report.ratios[f"first/later/{kind}/{batch}"] = first.median / later.median


def _in_process(code: str, arguments: list[Any]) -> list[float]:
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found: list[float] = json.loads(done.stdout)
    return found
