"""Samples a second of a DLRM by the number of processes: Hotbed's shared tables, and DDP."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import link as links
from benchmarks import worlds
from benchmarks.exchange import Measured, other_work
from benchmarks.machine import OtherWork, available_bytes
from benchmarks.measure import Timing
from benchmarks.peers.gathered_bags import gather_gradients
from benchmarks.peers.torch_dlrm import COLUMNS, DENSE, TorchDlrm
from benchmarks.report import Report
from benchmarks.step import SHARE_OF_MEMORY
from benchmarks.workload import BATCHES, Workload

ROWS, DIMS, BATCH = 250_000, (32, 64), 8192
QUICK_ROWS, QUICK_BATCH = 5_000, 1024
WORLDS = (1, 2, 4)
ITERATIONS, QUICK_ITERATIONS = 40, 4
LR = 0.01
BOTTOM, TOP = 64, (256, 128)
"""As of `TorchDlrm`; its bottom layers end with a table's width."""

Batch = dict[str, Tensor]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--link", choices=links.RATES, help="speed of the network between the processes"
    )
    parser.add_argument(
        "--linear", action="store_true", help="a linear layer over the sum of the vectors, no DLRM"
    )


def run(
    *, quick: bool, progress: Callable[[str], None], link: str | None = None, linear: bool = False
) -> Report:
    report = Report("scale", quick)
    for dim in DIMS[:1] if quick else DIMS:
        _measure(report, dim, progress, link, linear)
    if linear:
        report.remark("The dense part is a linear layer over the sum of the 26 vectors, no DLRM.")
    report.remarks += [
        "One thread a process; a step takes as long as the slowest rank takes. One process has no exchange.",
        "A ratio 'dim 32, hotbed, 2 over 1': samples a second with 2 processes over those with one.",
        "torch, DDP: each rank has all tables; sparse gradients are gathered, dense ones all-reduced.",
    ]
    if (cores := report.hardware["cores"]) < max(WORLDS):
        report.remark(f"This machine has {cores} cores, which more processes share.")
    return report


def _measure(
    report: Report, dim: int, progress: Callable[[str], None], link: str | None, linear: bool
) -> None:
    rows, batch = (QUICK_ROWS, QUICK_BATCH) if report.quick else (ROWS, BATCH)
    shape = f"{len(COLUMNS)} x {rows:,} x {dim}, Adagrad, batch {batch} in all"
    medians: dict[tuple[str, int], float] = {}
    for world in WORLDS:
        needed = (1 + world) * len(COLUMNS) * rows * dim * 4 * 2
        if needed > available_bytes() * SHARE_OF_MEMORY:
            report.skipped[f"{world} processes, dim {dim}"] = f"they need {needed / 1e9:.1f} GB"
            continue
        with network(report, world, link) as (prefix, environment):
            found = worlds.run(
                world,
                measure_rank,
                *(rows, dim, batch, QUICK_ITERATIONS if report.quick else ITERATIONS, linear),
                progress=lambda text, world=world: progress(
                    f"dim {dim}, {world} processes: {text}"
                ),
                prefix=prefix,
                environment=environment,
            )
        for name in found[0].work:
            slower = [max(all_) for all_ in zip(*(f.ms[name, ""] for f in found), strict=True)]
            timing = Timing(slower, other_work([f.work[name] for f in found]))
            report.add(name, f"{world} process{'es' * (world > 1)}, {shape}", timing)
            medians[name, world] = timing.median
    for (name, world), median in medians.items():
        report.figures[f"dim {dim}, {name}, {world}: samples a second"] = round(
            batch / median * 1e3
        )
        if world > 1:
            report.ratios[f"dim {dim}, {name}, {world} over 1"] = medians[name, 1] / median
        if name == DdpModel.name:
            dense, own = medians[DenseAlone.name, world], medians["hotbed", world]
            report.ratios[f"dim {dim}, {name}/{world}"] = median / own
            if world > 1:
                without = (median - dense) / (own - dense)
                report.ratios[f"dim {dim}, {name}/{world}, without dense layers"] = without


@contextlib.contextmanager
def network(
    report: Report, world: int, rate: str | None
) -> Iterator[tuple[Callable[[int], Sequence[str]], dict[str, str]]]:
    """What `worlds.run` is to be given, so that its processes are joined by links of `rate`."""
    with contextlib.ExitStack() as stack:
        if rate is not None and world > 1:
            try:
                prefix = stack.enter_context(links.ports(world, rate))
            except links.LinkError as error:
                report.remark(f"No link of {rate} can be made here ({error}); all is on loopback.")
            else:
                report.remark(f"Processes of one world are joined by links of {rate}.")
                yield prefix, {"GLOO_SOCKET_IFNAME": links.INTERFACE}
                return
        yield lambda rank: (), {}


# -- what each rank does -------------------------------------------------------------------------


class LinearOfSum(nn.Module):
    """Logits of samples by the sum of their vectors. `look_up`: gives the vectors of a batch."""

    def __init__(self, look_up: nn.Module, dim: int) -> None:
        super().__init__()
        self.look_up = look_up
        torch.manual_seed(0)
        self.top = nn.Linear(dim, 1)

    def forward(self, batch: Batch) -> Tensor:
        first, *others = self.look_up(batch)
        summed = first + others[0]
        for vectors in others[1:]:
            summed += vectors
        return self.top(summed).squeeze(1)


class HotbedVectors(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        import hotbed as hb

        super().__init__()
        tables = [hb.Table(name, dim=dim, rows=rows) for name in COLUMNS]
        self.embeddings = hb.EmbeddingCollection(tables, seed=0)

    def forward(self, batch: Batch) -> list[Tensor]:
        return [*self.embeddings({name: batch[name] for name in COLUMNS}).values()]


class TorchVectors(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim, sparse=True) for _ in COLUMNS)

    def forward(self, batch: Batch) -> list[Tensor]:
        return [table(batch[c]) for table, c in zip(self.tables, COLUMNS, strict=True)]


class GivenVectors(nn.Module):
    """As tables would give them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.vectors: list[Tensor] = []

    def forward(self, batch: Batch) -> list[Tensor]:
        if not self.vectors:
            made = torch.randn(len(COLUMNS), len(batch["label"]), self.dim)
            self.vectors = [vectors.requires_grad_() for vectors in made]
        return self.vectors


class HotbedModel:
    name = "hotbed"

    def __init__(self, rows: int, dim: int, linear: bool) -> None:
        import hotbed as hb
        import hotbed.models

        self.model: nn.Module
        if linear:
            self.model = LinearOfSum(HotbedVectors(rows, dim), dim)
        else:
            tables = [hb.Table(name, dim=dim, rows=rows) for name in COLUMNS]
            self.model = hotbed.models.DLRM(tables, dim, DENSE, (BOTTOM, dim), TOP, seed=0)
        if torch_dist.get_world_size() > 1:
            plan = hb.plan(self.model, torch_dist.get_world_size())
            linked = os.environ.get("GLOO_SOCKET_IFNAME") == links.INTERFACE
            hb.distribute(self.model, plan, shared_memory=not linked)
        self.optimizer = hb.optim.Adagrad(self.model.parameters(), lr=LR)

    def step(self, batch: Batch) -> None:
        _backward(self.model, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


class DdpModel:
    name = "torch, DDP"

    def __init__(self, rows: int, dim: int, linear: bool) -> None:
        torch.manual_seed(0)
        twin: nn.Module = TorchDlrm([rows] * len(COLUMNS), dim)
        if linear:
            twin = LinearOfSum(TorchVectors(rows, dim), dim)
        named = {n: p for n, p in twin.named_parameters() if "tables." in n}
        self.tables = [*named.values()]
        self.optimizer = torch.optim.Adagrad(twin.parameters(), lr=LR)
        self.model: nn.Module = twin
        if torch_dist.get_world_size() > 1:
            tables = [*named]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(twin, tables)
            self.model = DistributedDataParallel(twin)

    def step(self, batch: Batch) -> None:
        _backward(self.model, batch)
        if torch_dist.get_world_size() > 1:
            gather_gradients(self.tables)
        self.optimizer.step()
        self.optimizer.zero_grad()


class DenseAlone(nn.Module):
    """What Hotbed's model does beside its tables."""

    name = "dense layers alone"

    def __init__(self, rows: int, dim: int, linear: bool) -> None:
        import hotbed as hb

        super().__init__()
        self.given = GivenVectors(dim)
        self.linear = LinearOfSum(self.given, dim) if linear else None
        if not linear:
            self.bottom = hb.nn.MLP(DENSE, [BOTTOM, dim], final_activation="relu")
            self.interaction = hb.nn.DotInteraction()
            self.top = hb.nn.MLP(self.interaction.out_features(len(COLUMNS), dim), [*TOP, 1])
        self.optimizer = hb.optim.Adagrad(self.parameters(), lr=LR)
        several = torch_dist.get_world_size() > 1
        self._called: list[nn.Module] = [DistributedDataParallel(self) if several else self]

    def forward(self, batch: Batch) -> Tensor:
        if self.linear is not None:
            return self.linear(batch)
        vectors = dict(zip(COLUMNS, self.given(batch), strict=True))
        return self.top(self.interaction(self.bottom(batch["dense"]), vectors)).squeeze(1)

    def step(self, batch: Batch) -> None:
        _backward(self._called[0], batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for vectors in self.given.vectors:
            vectors.grad = None


def _backward(model: nn.Module, batch: Batch) -> None:
    nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()


def measure_rank(
    rank: int, world: int, rows: int, dim: int, batch: int, iterations: int, linear: bool
) -> Measured:
    """All models in turn, a step each."""
    work = Workload(len(COLUMNS), rows, dim, batch, 1).share(rank, world)
    batches = _batches(work, rank)
    models: list[Any] = []
    for kind in (HotbedModel, DdpModel, DenseAlone):
        if rank == 0:
            worlds.tell(f"building {kind.name}")
        models.append(kind(rows, dim, linear))
    measured = Measured()
    for batch_of_rank in batches:
        for model in models:
            model.step(batch_of_rank)
    if rank == 0:
        worlds.tell(" and ".join(model.name for model in models))
    gc.collect()
    gc.disable()
    with OtherWork() as other:
        for i in range(iterations):
            for model in models:
                torch_dist.barrier()
                begin = time.perf_counter()
                model.step(batches[i % len(batches)])
                measured.note(model.name, {"": (time.perf_counter() - begin) * 1e3})
    for model in models:
        measured.note_work(model.name, other)
    return measured


def _batches(work: Workload, rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            **{name: torch.from_numpy(ids) for name, ids in zip(COLUMNS, work.ids[b], strict=True)},
            "dense": torch.rand(work.batch, DENSE, generator=generator),
            "label": torch.rand(work.batch, generator=generator).round(),
        }
        for b in range(BATCHES)
    ]
