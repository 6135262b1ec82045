"""Pooled vectors of a bundle's rows: float32 beside torch.nn.EmbeddingBag over the same pages, int8 and int4
beside FBGEMM's bags for inference. Also a request of one sample for 26 tables."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.machine import available_bytes
from benchmarks.measure import contest
from benchmarks.peers.served_rows import BundleRows, FbgemmRows, MappedBags, RowFiles
from benchmarks.report import Report
from benchmarks.workload import Workload

TABLES, ROWS, BATCH = 8, 400_000, 2048
DIMS = (16, 64, 128)
BAGS = ((10, False), (20, True))
"""Ids of a bag, and whether that many on average: from 0 to twice as many."""
FORMS = ("float32", "int8", "int4")
THREADS = (1, 2)
REQUEST_TABLES, REQUEST_ROWS, REQUEST_DIM = 26, 100_000, 16
ITERATIONS, QUICK_ITERATIONS, REQUESTS = 25, 3, 500
SHARE_OF_MEMORY = 0.75


def run(*, quick: bool, progress: Callable[[str], None]) -> Report:
    report = Report("quantized", quick)
    threads_before = torch.get_num_threads()
    for dim in DIMS:
        for bag, ragged in BAGS:
            rows, batch = (5000, 64) if quick else (ROWS, BATCH)
            work = Workload(TABLES, rows, dim, batch, bag, ragged=ragged)
            for form in FORMS:
                for threads in THREADS:
                    torch.set_num_threads(threads)
                    _pooled(report, RowFiles(work, form), threads, progress)
    torch.set_num_threads(threads_before)
    for form in FORMS:
        progress(f"a request, {form}")
        work = Workload(REQUEST_TABLES, REQUEST_ROWS // (20 if quick else 1), REQUEST_DIM, 1, 1)
        ours = BundleRows(RowFiles(work, form))
        timings = contest([ours], available_bytes(), iterations=5 if quick else REQUESTS)
        report.add(ours.name, f"{form}, a request: {work.shape}", timings[ours.name, "forward"])
    if reason := FbgemmRows.lacks():
        report.remarks.append(f"Not measured: {reason}.")
    report.remarks.append("Forward, sums, float32 vectors, ids by a power law (alpha 1.05).")
    return report


def _pooled(report: Report, files: RowFiles, threads: int, progress: Callable[[str], None]) -> None:
    ours = BundleRows(files)
    contenders: list[BundleRows | MappedBags | FbgemmRows] = [ours]
    if files.stored_as == "float32":
        contenders.append(MappedBags(files))
    elif FbgemmRows.lacks() is None:
        contenders.append(FbgemmRows(files))
    shape = f"{files.workload.shape}, {threads} thread{'s'[: threads - 1]}"
    timings = contest(
        contenders,
        int(available_bytes() * SHARE_OF_MEMORY),
        iterations=QUICK_ITERATIONS if report.quick else ITERATIONS,
        progress=lambda text: progress(f"{files.stored_as}, {shape}: {text}"),
    )
    for contender in contenders:
        report.add(
            contender.name,
            f"{files.stored_as}, {shape}",
            timings[contender.name, "forward"],
            files.least_bytes(),
            threads,
        )
    for peer in contenders[1:]:
        ratio = f"{peer.name}/{files.stored_as}, {shape}"
        theirs = timings[peer.name, "forward"].median
        report.ratios[ratio] = theirs / timings[ours.name, "forward"].median
