"""Scenarios `cache ...` of the GPU benchmark: steps of nothing but tables, a share of them in GPU memory.

The configuration is the one that dynamicemb publishes for FBGEMM and itself. Row values do not
matter to time, so tables start from zeros.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks import synthetic
from benchmarks.gpu_scenarios import Run, Scenario
from benchmarks.gpu_sizes import Sizes
from benchmarks.gpu_training import ALPHA, Batch, add_counts, all_there, trained
from benchmarks.measure import Timing
from benchmarks.workload import STATE_FLOATS, least_step_bytes, power_law_ranks

PUBLISHED = (
    "cache: shares are of what the rows take that any of the batches uses, with their states, as "
    "published; every batch was trained on before. Published on one H100-80GB for 10 x 26.8 M x "
    "128, forward + backward with the update, at 1.0: FBGEMM 4.15 (SGD) and 14.37 ms (Adam), "
    "dynamicemb 10.87 and 12.28; at 0.8: FBGEMM 4.77 and 15.00, dynamicemb 20.83 and 24.33."
)

DEPTHS = (0, 1, 2, 4)
"""Of look-ahead: without it, and among which the best one is."""


def scenarios(sizes: Sizes) -> list[Scenario]:
    return [
        Scenario(f"cache, {name}", functools.partial(_measure, name=name), seconds=40)
        for name in ("sgd", "adam")
    ]


def _measure(run: Run, name: str) -> None:
    run.report.remark(PUBLISHED)
    sizes = run.sizes
    record = 4 * (sizes.dim + STATE_FLOATS[name](sizes.dim))
    gradient = torch.randn(sizes.cache_batch, sizes.cache_tables * sizes.dim).to(run.device)
    whole = _in_gpu_memory(run, name, record, gradient)
    run.give_memory_back()

    run.doing(f"cache, {name}: drawing batches")
    batches = list(_ids(sizes.cache_rows, sizes))
    distinct = sum(
        len(torch.unique(torch.cat([batch[f"t{t}"] for batch in batches])))
        for t in range(sizes.cache_tables)
    )
    run.report.figures[f"cache, {name}: rows that the batches use"] = distinct
    # With what a slot takes beside its row, and staging.
    footprint = distinct * (record + 64) + (16 << 20)
    for share in sizes.cache_shares:
        _over_ram(run, name, gradient, batches, footprint, share, whole)
        run.give_memory_back()


def _in_gpu_memory(run: Run, name: str, record: int, gradient: Tensor) -> Timing:
    sizes = run.sizes
    wanted = (sizes.cache_rows,) * sizes.cache_tables
    what = f"cache, {name}, all in GPU memory"
    rows = run.fitting(wanted, record, run.device_room() / 2, what)[0]
    run.doing(what)
    there = [all_there(batch, run.device) for batch in _ids(rows, sizes)]
    model, optimizer = _made(run, name, rows, None)
    timing = trained(run, model, optimizer, itertools.cycle(there), gradient=gradient)
    moved = _least_bytes(there[0], name, sizes)
    run.add(f"{_shape(name, rows, sizes)}, all in GPU memory", timing, moved)
    return timing


def _over_ram(
    run: Run,
    name: str,
    gradient: Tensor,
    batches: list[Batch],
    footprint: int,
    share: float,
    whole: Timing,
) -> None:
    sizes, shape = run.sizes, _shape(name, run.sizes.cache_rows, run.sizes)
    run.doing(f"{shape}: {share:g} of the footprint")
    storage = hb.Storage(device=int(share * footprint * 1.05), host=int(1.5 * footprint))
    model, optimizer = _made(run, name, sizes.cache_rows, storage)
    before, moved = sizes.batches, _least_bytes(batches[0], name, sizes)
    for ahead in DEPTHS:
        mode = f"look-ahead {ahead} deep" if ahead else "no look-ahead"
        label = f"{shape}, {share:g} x on the device, {mode}"
        run.doing(label)
        stats = model.embeddings.stats()
        feed = itertools.islice(itertools.cycle(batches), before + sizes.warm_up + sizes.steps)
        try:
            timing = trained(
                run, model, optimizer, feed, gradient=gradient, ahead=ahead, before=before
            )
        except hb.StorageError as error:
            run.report.remark(f"{label}: {error}")
            continue
        run.add(label, timing, moved)
        run.report.ratios[f"{label} / all in GPU memory"] = timing.median / whole.median
        add_counts(run, label, stats, model.embeddings.stats())


def _least_bytes(batch: Batch, name: str, sizes: Sizes) -> float:
    """What the tables must move in GPU memory."""
    return least_step_bytes([(table, ids, sizes.dim) for table, ids in batch.items()], name)


def _shape(name: str, rows: int, sizes: Sizes) -> str:
    return f"cache, {name}, {sizes.cache_tables} x {rows:,} x {sizes.dim}"


class _Vectors(nn.Module):
    """Nothing but tables."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch: Batch) -> Tensor:
        return hb.nn.concat(self.embeddings(batch))


def _made(run: Run, name: str, rows: int, storage: hb.Storage | None) -> tuple[nn.Module, Any]:
    tables = [
        hb.Table(f"t{t}", run.sizes.dim, rows, "sum", init=hb.init.Zeros())
        for t in range(run.sizes.cache_tables)
    ]
    made = hb.EmbeddingCollection(tables, seed=0, storage=storage, device=run.device)
    model = _Vectors(made)
    return model, synthetic.OPTIMIZERS[name](model.parameters())


def _ids(rows: int, sizes: Sizes) -> Iterator[Batch]:
    rng = np.random.default_rng(0)
    for _ in range(sizes.batches):
        ids = power_law_ranks(rng, sizes.cache_tables * sizes.cache_batch, rows, ALPHA)
        parts = torch.from_numpy(ids).split(sizes.cache_batch)
        yield {f"t{t}": part.clone() for t, part in enumerate(parts)}
