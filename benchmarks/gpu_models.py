"""Scenarios `synthetic`, `dlrm` and `cache` of the GPU benchmark: whole training steps through the
public interface, with tables in GPU memory or in RAM below it.

Row values do not matter to time, so tables start from zeros, which saves minutes of drawing them.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks import synthetic
from benchmarks.gpu_roof import Roof
from benchmarks.machine import available_bytes
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.steps import timed_steps
from benchmarks.synthetic_models import synthetic_model
from benchmarks.workload import STATE_FLOATS, power_law_ranks

# Rows of Criteo's 26 tables in the MLPerf benchmark, in which ids are taken modulo 40 M.
CRITEO_1TB = (39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10)
CRITEO_1TB += (2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36)
ALPHA = 1.05
SHARE_OF_DEVICE = 0.8
SHARE_OF_RAM = 0.5
WRITTEN_AT_ONCE = 1 << 18
LIMIT = 1e-5
"""The largest difference from the core's rows that is taken for rounding."""


@dataclass(frozen=True)
class Sizes:
    """How large the scenarios are; the default is what is quoted."""

    batch: int = 65536
    dim: int = 128
    batches: int = 10
    """Batches of `synthetic` and `cache`, used in turn; `dlrm` uses none twice."""
    warm_up: int = 10
    steps: int = 30
    rows: tuple[int, ...] = CRITEO_1TB
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512, 256)
    device_budgets: tuple[int, ...] = (24 * 10**9, 12 * 10**9)
    most_in_ram: int = 40 * 10**9
    """Bytes of rows below the device: writing each once is most of a scenario's time."""
    cache_tables: int = 10
    cache_rows: int = 26_800_000
    cache_batch: int = 104_857
    cache_shares: tuple[float, ...] = (1.0, 0.8, 0.1)
    synthetic: tuple[str, ...] = ("tiny", "small")
    synthetic_most_rows: int | None = None


QUICK = Sizes(
    batch=512,
    dim=16,
    batches=4,
    warm_up=2,
    steps=3,
    rows=(3000, 50, 4, 700),
    bottom=(32,),
    top=(32,),
    device_budgets=(200_000,),
    most_in_ram=4 * 10**6,
    cache_tables=2,
    cache_rows=2000,
    cache_batch=256,
    synthetic=("tiny",),
    synthetic_most_rows=1000,
)


def check(device: str, small: bool) -> dict[str, float]:
    """Trains a small collection there and by the core: the largest difference over the largest value.

    Raises:
        AssertionError: it is more than LIMIT.
    """
    found = {}
    for name, storage in (
        ("whole tables on the device", None),
        ("tables in tiers on the device", hb.Storage(device=60_000, host="4MB")),
    ):
        here, there = (_trained_rows(where, storage) for where in (None, device))
        error = max(float((here[n] - there[n]).abs().max() / here[n].abs().max()) for n in here)
        if not error <= LIMIT:
            raise AssertionError(f"{name}: rows are off by {error:.2g} of the largest.")
        found[name] = error
    return found


def _trained_rows(device: str | None, storage: hb.Storage | None) -> dict[str, Tensor]:
    """The rows of two tables after four steps on a device, or by the core."""
    rows, dim, batch = 200, 8, 16
    tables = [hb.Table("a", dim, rows, "sum"), hb.Table("b", dim, rows, "mean")]
    module = hb.EmbeddingCollection(tables, seed=0, storage=storage)
    if device is not None:
        _place(module, device)
    optimizer = hb.optim.Adagrad(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = {name: torch.randint(0, rows, (batch, 2), generator=generator) for name in "ab"}
        target = torch.randn(batch, dim, generator=generator)
        vectors = module(ids)
        target = target.to(vectors["a"].device)
        (vectors["a"] * target + vectors["b"] * target.flip(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: module.rows(name).values.cpu() for name in "ab"}


def _place(module: hb.EmbeddingCollection, device: str) -> None:
    """Moves tables; the CPU stands in for a device where kernels are interpreted."""
    if device != "cpu":
        module.to(device)
        return
    from hotbed.ops.gpu import variants

    before, variants.DEVICES = variants.DEVICES, ("cpu",)
    try:
        for name in module.tables:
            module.table(name).move_to(torch.device("cpu"))
    finally:
        variants.DEVICES = before


def measure(report: Report, roof: Roof | None, progress: Callable[[str], None]) -> None:
    """Adds the rows of all three scenarios. Without a roof: on the CPU, to see that it runs."""
    device = torch.device("cpu" if roof is None else "cuda")
    sizes = QUICK if report.quick else Sizes()
    for scenario in (_synthetic, _dlrm, _cache):
        scenario(report, sizes, device, roof, progress)
        _give_memory_back(device)


# -- synthetic -----------------------------------------------------------------------------------


def _synthetic(
    report: Report,
    sizes: Sizes,
    device: torch.device,
    roof: Roof | None,
    progress: Callable[[str], None],
) -> None:
    for name in sizes.synthetic:
        progress(f"synthetic {name}: making the model")
        model = synthetic_model(name)
        if sizes.synthetic_most_rows:
            model = model.scaled(sizes.synthetic_most_rows)
        needed = 2 * 4 * model.parameters
        if needed > _free(device) * SHARE_OF_DEVICE:
            report.remarks.append(
                f"synthetic {name}: takes {needed / 1e9:.0f} GB and was left out on this card."
            )
            continue
        network = synthetic.Network(model).to(device)
        optimizer = synthetic.OPTIMIZERS["adagrad"](network.parameters())
        batches = [synthetic.drawn(model, sizes.batch, seed) for seed in range(sizes.batches)]
        moved = synthetic.step_bytes(model, batches, "adagrad")
        there = [_all_there(batch, device) for batch in batches]
        progress(f"synthetic {name}: training")
        timing = _trained(network, optimizer, itertools.cycle(there), sizes, device)
        _add(report, roof, f"synthetic {name}, adagrad, batch {sizes.batch:,}", timing, moved)
        del network, optimizer, there
        _give_memory_back(device)
    report.remarks.append(
        "synthetic: NVIDIA states 17.6 ms (tiny) and 57.8 ms (small) on one A100-80GB, on a later "
        "page 24.4 and 67.4, and 42.7 ms for tiny on one T4."
    )


# -- dlrm ----------------------------------------------------------------------------------------


def _dlrm(
    report: Report,
    sizes: Sizes,
    device: torch.device,
    roof: Roof | None,
    progress: Callable[[str], None],
) -> None:
    rows = _within(sizes.rows, 4 * sizes.dim, _free(device) * SHARE_OF_DEVICE, report, "dlrm")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        progress("dlrm: all in GPU memory")
        model = _criteo_model(rows, sizes, None).to(device)
        optimizer = hb.optim.SGD(model.parameters(), lr=0.01)
        rates = {}
        for amp in (False, True):
            there = [_all_there(b, device) for b in _clicks(rows, sizes)]
            timing = _trained(model, optimizer, iter(there), sizes, device, amp=amp)
            how = "AMP" if amp else "TF32"
            rates[amp] = sizes.batch / timing.median * 1e3
            _add(report, roof, f"dlrm, all in GPU memory, {how}, batch {sizes.batch:,}", timing)
            report.figures[f"dlrm, all in GPU memory, {how}: samples a second"] = round(rates[amp])
        del model, optimizer, there
        _give_memory_back(device)

        rows = _within(rows, 4 * sizes.dim, _ram(sizes), report, "dlrm over RAM")
        for budget in sizes.device_budgets:
            name = f"dlrm over RAM, {budget / 1e9:g} GB on the device"
            progress(f"{name}: writing rows")
            host = int(sum(rows) * (4 * sizes.dim + 64) * 1.1) + (64 << 20)
            model = _criteo_model(rows, sizes, hb.Storage(device=budget, host=host)).to(device)
            optimizer = hb.optim.SGD(model.parameters(), lr=0.01)
            _write_all(model.embeddings)
            for ahead in (False, True):
                progress(f"{name}, {'look-ahead' if ahead else 'no look-ahead'}")
                stats = model.embeddings.stats()
                batches = iter(list(_clicks(rows, sizes, seed=1 + ahead)))
                timing = _trained(
                    model, optimizer, batches, sizes, device, amp=True, ahead=ahead
                )  # fmt: skip
                label = f"{name}, AMP, {'look-ahead' if ahead else 'no look-ahead'}"
                _add(report, roof, f"{label}, batch {sizes.batch:,}", timing)
                rate = sizes.batch / timing.median * 1e3
                report.figures[f"{label}: samples a second"] = round(rate)
                report.ratios[f"{label} / all in GPU memory"] = rate / rates[True]
                _add_counts(report, label, stats, model.embeddings.stats())
            del model, optimizer
            _give_memory_back(device)
    finally:
        torch.set_float32_matmul_precision(before)
    report.remarks.append(
        "dlrm: OneEmbedding states about 6 M samples/s with AMP on one A100-80GB; "
        "distributed-embeddings 768 k on one A100 with its large tables in RAM. Batches are drawn "
        "beforehand; those of the runs without tiers lie on the device."
    )


def _criteo_model(rows: tuple[int, ...], sizes: Sizes, storage: hb.Storage | None) -> nn.Module:
    torch.manual_seed(0)
    zeros = hb.init.Zeros()
    tables = [hb.Table(f"t{t}", sizes.dim, n, "sum", init=zeros) for t, n in enumerate(rows)]
    bottom = [*sizes.bottom, sizes.dim]
    return hb.models.DLRM(tables, sizes.dim, 13, bottom, sizes.top, seed=0, storage=storage)


def _clicks(rows: tuple[int, ...], sizes: Sizes, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    rng = np.random.default_rng(seed)
    for _ in range(_count(sizes)):
        batch: dict[str, Tensor] = {
            f"t{t}": torch.from_numpy(power_law_ranks(rng, sizes.batch, n, ALPHA))
            for t, n in enumerate(rows)
        }
        batch["dense"] = torch.from_numpy(rng.random((sizes.batch, 13), np.float32))
        batch["label"] = torch.from_numpy(rng.integers(0, 2, sizes.batch).astype(np.float32))
        yield batch


# -- cache ---------------------------------------------------------------------------------------


class _Sum(nn.Module):
    """Vectors whose loss is their product with fixed numbers: a step of tables and nothing else."""

    def __init__(self, embeddings: Any, gradient: Tensor) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.register_buffer("gradient", gradient)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return hb.nn.concat(self.embeddings(batch))


def _cache(
    report: Report,
    sizes: Sizes,
    device: torch.device,
    roof: Roof | None,
    progress: Callable[[str], None],
) -> None:
    gradient = torch.randn(sizes.cache_batch, sizes.cache_tables * sizes.dim)

    def made(name: str, rows: int, storage: hb.Storage | None) -> tuple[nn.Module, Any]:
        tables = [
            hb.Table(f"t{t}", sizes.dim, rows, "sum", init=hb.init.Zeros())
            for t in range(sizes.cache_tables)
        ]
        collection = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        model = _Sum(collection, gradient).to(device)
        return model, synthetic.OPTIMIZERS[name](model.parameters())

    for name in ("sgd", "adam"):
        record = 4 * (sizes.dim + STATE_FLOATS[name](sizes.dim))
        wanted = (sizes.cache_rows,) * sizes.cache_tables
        room = _free(device) * SHARE_OF_DEVICE / 2
        whole_rows = _within(wanted, record, room, report, f"cache, {name}, all in GPU memory")[0]
        progress(f"cache, {name}: all in GPU memory")
        there = [_all_there(batch, device) for batch in _ids(whole_rows, sizes)]
        model, optimizer = made(name, whole_rows, None)
        whole = _trained(model, optimizer, itertools.cycle(there), sizes, device)
        label = f"cache, {name}, {sizes.cache_tables} x {whole_rows:,} x {sizes.dim}"
        _add(report, roof, f"{label}, all in GPU memory", whole)
        del model, optimizer, there
        _give_memory_back(device)

        batches = list(_ids(sizes.cache_rows, sizes))
        distinct = sum(
            len(torch.unique(torch.cat([batch[f"t{t}"] for batch in batches])))
            for t in range(sizes.cache_tables)
        )
        # With what a slot takes beside its row, and staging.
        footprint = distinct * (record + 64) + (16 << 20)
        report.figures[f"cache, {name}: rows that the batches use"] = distinct
        shape = f"cache, {name}, {sizes.cache_tables} x {sizes.cache_rows:,} x {sizes.dim}"
        for share in sizes.cache_shares:
            progress(f"{shape}: {share:g} of the footprint")
            budget = int(share * footprint * 1.05)
            storage = hb.Storage(device=budget, host=int(1.5 * footprint))
            model, optimizer = made(name, sizes.cache_rows, storage)
            for ahead in (False, True):
                mode = "look-ahead" if ahead else "no look-ahead"
                label = f"{shape}, {share:g} x on the device, {mode}"
                stats = model.embeddings.stats()
                feed = itertools.islice(
                    itertools.cycle(batches), sizes.batches + sizes.warm_up + sizes.steps
                )
                try:
                    timing = _trained(
                        model, optimizer, feed, sizes, device, ahead=ahead, before=sizes.batches
                    )
                except hb.StorageError as error:
                    report.remarks.append(f"{label}: {error}")
                    continue
                _add(report, roof, label, timing)
                report.ratios[f"{label} / all in GPU memory"] = timing.median / whole.median
                _add_counts(report, label, stats, model.embeddings.stats())
            del model, optimizer
            _give_memory_back(device)
    report.remarks.append(
        "cache: shares are of what the rows take that any of the batches uses, with their states, as "
        "published; every batch was trained on before. Published on one H100-80GB for 10 x 26.8 M x "
        "128, forward + backward with the update, at 1.0: FBGEMM 4.15 (SGD) and 14.37 ms (Adam), "
        "dynamicemb 10.87 and 12.28; at 0.8: FBGEMM 4.77 and 15.00, dynamicemb 20.83 and 24.33."
    )


def _ids(rows: int, sizes: Sizes) -> Iterator[dict[str, Tensor]]:
    rng = np.random.default_rng(0)
    for _ in range(sizes.batches):
        ids = power_law_ranks(rng, sizes.cache_tables * sizes.cache_batch, rows, ALPHA)
        parts = torch.from_numpy(ids).split(sizes.cache_batch)
        yield {f"t{t}": part.clone() for t, part in enumerate(parts)}


# -- what they share -----------------------------------------------------------------------------


def _trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[dict[str, Tensor]],
    sizes: Sizes,
    device: torch.device,
    *,
    amp: bool = False,
    ahead: bool = False,
    before: int = 0,
) -> Timing:
    """Milliseconds a step, after the warm-up and `before` more steps; ids of tiered tables stay on the
    host."""

    def step(batch: dict[str, Tensor]) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            if isinstance(model, _Sum):
                torch.autograd.backward(model(batch), model.gradient)
            else:
                batch = _dense_there(batch, device)
                out = model(batch)
                loss_of = nn.functional.binary_cross_entropy_with_logits
                loss_of(out.float(), batch["label"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    feed: Iterable[Any] = batches
    if ahead:
        feed = hb.lookahead(feed, model)
    return timed_steps(step, feed, device, before + sizes.warm_up, sizes.steps)


def _count(sizes: Sizes) -> int:
    """Batches of a training."""
    return sizes.warm_up + sizes.steps


def _all_there(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in batch.items()}


def _dense_there(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same tensors but for the dense part, which is copied to the device."""
    dense = {n: x.to(device, non_blocking=True) for n, x in batch.items() if x.is_floating_point()}
    return {**batch, **dense}


def _write_all(embeddings: Any) -> None:
    """Every row exists afterwards: otherwise a miss would cost no read."""
    for name, table in embeddings.tables.items():
        for begin in range(0, table.rows, WRITTEN_AT_ONCE):
            ids = torch.arange(begin, min(begin + WRITTEN_AT_ONCE, table.rows))
            embeddings.assign(name, ids, torch.zeros(len(ids), table.dim))


def _within(
    rows: tuple[int, ...], row_bytes: int, room: float, report: Report, what: str
) -> tuple[int, ...]:
    """The same tables, the largest cut alike so that all take at most `room` bytes."""
    low, high = 1, max(rows)
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(min(n, middle) for n in rows) * row_bytes <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    if low < max(rows):
        total = sum(min(n, low) for n in rows)
        report.remarks.append(
            f"{what}: tables are cut to {low:,} rows, {total / sum(rows):.0%} of all, to fit into "
            f"{room / 1e9:.0f} GB."
        )
    return tuple(min(n, low) for n in rows)


def _add_counts(
    report: Report, label: str, before: dict[str, float], after: dict[str, float]
) -> None:
    used = after["rows_used"] - before["rows_used"]
    missed = after["rows_missed"] - before["rows_missed"]
    batches = after["batches"] - before["batches"]
    moving = (after["move_ms"] - before["move_ms"]) / max(batches, 1)
    report.figures[f"{label}: hit rate"] = round(1 - missed / used, 4)
    report.figures[f"{label}: rows brought up a step"] = round(missed / max(batches, 1))
    report.figures[f"{label}: ms a step moving rows"] = round(moving, 2)


def _add(
    report: Report, roof: Roof | None, config: str, timing: Timing, moved: float | None = None
) -> None:
    if moved is None or roof is None:
        report.add("hotbed", config, timing)
    else:
        report.add("hotbed", config, timing, moved, floor_ms=roof.floor_ms(moved))


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 10**9


def _ram(sizes: Sizes) -> int:
    return min(int(available_bytes() * SHARE_OF_RAM), sizes.most_in_ram)


def _give_memory_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
