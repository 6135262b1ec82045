"""Scenario `lookup` of the GPU benchmark: lookups of tables that lie in GPU memory, and their steps.

The configuration is the one that dynamicemb publishes for FBGEMM and itself: ten tables of
1.68 M x 128 float32, one id a bag, 1,048,570 ids a step, power law 1.05.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_roof import ITERATIONS, Roof, timed
from benchmarks.gpu_scenarios import Run
from benchmarks.report import Report
from benchmarks.workload import Workload

TABLES, ROWS, DIM, BATCH = 10, 1_680_000, 128, 104_857
QUICK_ROWS, QUICK_BATCH = 20_000, 2_048
OPTIMIZERS = {"sgd": {"lr": 0.01}, "adam": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}}
LIMIT = 1e-5
"""The largest error over the largest value."""

PUBLISHED = (
    "Published on one H100-80GB by dynamicemb, forward + backward with the update, ms: FBGEMM 0.96 "
    "(SGD), 1.35 (Adam); dynamicemb 1.92, 2.19; forward alone 0.41 and 0.64."
)


def check(device: str, small: bool) -> dict[str, float]:
    """Forward, gradient and steps of a small batch against float64.

    Raises:
        AssertionError: a value is off by more than LIMIT.
    """
    rows, dim, batch = (30, 8, 20) if small else (5_000, DIM, 4_000)
    found = {}
    for optimizer in OPTIMIZERS:
        generator = torch.Generator().manual_seed(0)
        slots = torch.randint(0, rows, (2 * batch,), generator=generator)
        slots[torch.rand(2 * batch, generator=generator) < 0.1] = rows // 2  # a hot row
        weights = torch.randn(rows, dim, generator=generator)
        grad = torch.randn(batch, dim, generator=generator)
        lookup, step = _lookup([weights.to(device)], optimizer)
        features = _features([slots.to(device)], fixed=2, combiner="mean")
        out = lookup.forward(features)
        exact = weights.double()
        expected = exact[slots].view(batch, 2, dim).mean(1)
        found["lookup forward"] = _error(out.outputs[0], expected)
        lookup.update(lookup.backward(out, [grad.to(device)]), step(1))
        total = torch.zeros_like(exact)
        total.index_add_(0, slots, (grad.double() / 2).repeat_interleave(2, 0))
        if optimizer == "sgd":
            exact -= OPTIMIZERS["sgd"]["lr"] * total
        else:  # the first step of Adam: the gradient over its own root
            moved = OPTIMIZERS["adam"]["lr"] * total / (total.abs() + 1e-8)
            exact -= moved
        found[f"lookup step, {optimizer}"] = _error(lookup.tables[0].weights, exact)
    for name, error in found.items():
        if not error <= LIMIT:
            raise AssertionError(f"{name} is off by {error:.2g} of its largest value.")
    return found


def measure(run: Run) -> None:
    """Adds the rows of every optimizer: forward, and forward + backward + update."""
    report, roof = run.report, run.roof
    rows = QUICK_ROWS if report.quick else _fitting_rows(report)
    run.doing(f"lookup: drawing batches over {TABLES} tables of {rows:,} rows")
    work = Workload(TABLES, rows, DIM, QUICK_BATCH if report.quick else BATCH, 1)
    slots = [[torch.from_numpy(ids).cuda() for ids in batch] for batch in work.ids]
    gradient = work.output_gradient().cuda()
    iterations = 5 if report.quick else ITERATIONS
    for optimizer in OPTIMIZERS:
        run.doing(f"lookup, {optimizer}")
        weights = [work.initial_weights(t).cuda() for t in range(TABLES)]
        hotbed = _Hotbed(weights, slots, gradient, optimizer)
        rival = _Torch(weights, slots, gradient, optimizer)
        if optimizer == "sgd":
            forwards = {"hotbed": hotbed.forward, "torch": rival.forward}
            compiled = _compiled(run, rival)
            if compiled is not None:
                forwards["torch compiled"] = compiled
            _add(report, roof, work.forward_bytes(), f"lookup, forward, {work.shape}", forwards,
                 iterations)  # fmt: skip
        steps: dict[str, Callable[[], object]] = {
            "hotbed": lambda hotbed=hotbed: hotbed.step(None),
            "hotbed, index before": lambda hotbed=hotbed: hotbed.step(hotbed.indices),
            "hotbed, not fused": lambda hotbed=hotbed: hotbed.step(None, fused=False),
            "torch": rival.step,
        }
        config = f"lookup, {optimizer}, forward+backward+update, {work.shape}"
        _add(report, roof, work.step_bytes(optimizer), config, steps, iterations)
        indices = {"hotbed": lambda hotbed=hotbed: hotbed.transpose()}
        config = f"lookup, transposed index, {work.shape}"
        if optimizer == "sgd":
            _add(report, roof, 24.0 * TABLES * work.batch, config, indices, iterations)
        report.figures[f"lookup, {optimizer}: host ms to start a step"] = round(_host(steps), 3)
        del hotbed, rival, weights, steps, indices
        torch.cuda.empty_cache()
    report.figures["lookup: unique rows a batch"] = work.unique_rows
    report.remarks.append(PUBLISHED)


class _Hotbed:
    def __init__(
        self, weights: Sequence[Tensor], slots: list[list[Tensor]], gradient: Tensor, optimizer: str
    ) -> None:
        self.lookup, self.step_of = _lookup([w.clone() for w in weights], optimizer)
        self.features = [_features(batch) for batch in slots]
        self.indices = [self.lookup.transpose(batch) for batch in self.features]
        self.gradients = gradient.split(DIM, 1)
        self.count = 0

    def forward(self) -> object:
        return self.lookup.forward(self._next())

    def transpose(self) -> object:
        return self.lookup.transpose(self._next())

    def step(self, indices: Any, fused: bool = True) -> None:
        features = self._next()
        index = indices[self.count % len(indices)] if indices else None
        batch = self.lookup.forward(features)
        terms = self.lookup.backward(batch, self.gradients, index)
        self.lookup.update(terms, self.step_of(self.count), fused=fused)

    def _next(self) -> Any:
        self.count += 1
        return self.features[self.count % len(self.features)]


class _Torch:
    def __init__(
        self, weights: Sequence[Tensor], slots: list[list[Tensor]], gradient: Tensor, optimizer: str
    ) -> None:
        # torch announces once that it does not check its own sparse tensors.
        warnings.filterwarnings("ignore", message=".*[Ss]parse invariant.*")
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag.from_pretrained(w.clone(), freeze=False, mode="sum", sparse=True)
            for w in weights
        )
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}[optimizer]
        self.optimizer = kind(list(self.bags.parameters()), lr=OPTIMIZERS[optimizer]["lr"])
        self.batches = [[ids.unsqueeze(1) for ids in batch] for batch in slots]
        self.gradients = [g.contiguous() for g in gradient.split(DIM, 1)]
        self.count = 0

    def look_up(self, ids: list[Tensor]) -> list[Tensor]:
        return [bag(x) for bag, x in zip(self.bags, ids, strict=True)]

    @torch.no_grad()
    def forward(self) -> object:
        return self.look_up(self._next())

    def step(self) -> None:
        torch.autograd.backward(self.look_up(self._next()), self.gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _next(self) -> list[Tensor]:
        self.count += 1
        return self.batches[self.count % len(self.batches)]


def _compiled(run: Run, rival: _Torch) -> Callable[[], object] | None:
    """torch's forward, compiled, if torch can."""

    @torch.no_grad()
    def forward(look_up: Any) -> object:
        return look_up(rival._next())

    compiled = run.compiled("lookup", rival.look_up, forward)
    return None if compiled is None else functools.partial(forward, compiled)


def _add(
    report: Report,
    roof: Roof,
    moved: float,
    config: str,
    contenders: dict[str, Callable[[], object]],
    iterations: int,
) -> None:
    timings = timed(contenders, iterations)
    for name, timing in timings.items():
        report.add(name, config, timing, moved, floor_ms=roof.floor_ms(moved))
        if name.startswith("torch"):
            ratio = timing.median / timings["hotbed"].median
            report.ratios[f"{name}/{config}"] = ratio


def _host(steps: dict[str, Callable[[], object]]) -> float:
    """Milliseconds in which Python starts a step whose index was built before."""
    torch.cuda.synchronize()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        steps["hotbed, index before"]()
        times.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
    return sorted(times)[len(times) // 2]


def _lookup(weights: Sequence[Tensor], optimizer: str) -> tuple[Any, Callable[[int], list[Any]]]:
    """A TableKernels of the tables, and its steps by their number."""
    from hotbed import _core
    from hotbed.ops.gpu.table_kernels import Step, TableKernels
    from hotbed.ops.gpu.update import DevicePlanes

    options, hyper = _core.RuleOptions(), _core.Hyperparameters()
    options.rule = getattr(_core.Rule, optimizer)
    for name, value in OPTIMIZERS[optimizer].items():
        setattr(hyper, name, value)
    states = len(_core.state_planes(options))
    tables = [
        DevicePlanes(weights=w, states=[torch.zeros_like(w) for _ in range(states)])
        for w in weights
    ]
    return TableKernels(
        tables
    ), lambda n: [Step(options=options, hyper=hyper, step=n)] * len(tables)


def _features(slots: Sequence[Tensor], **options: Any) -> list[Any]:
    from hotbed.ops.gpu.pool import FeatureSlots

    return [FeatureSlots(table=t, slots=s, **options) for t, s in enumerate(slots)]


def _error(actual: Tensor, expected: Tensor) -> float:
    scale = max(1.0, float(expected.abs().max()))
    return float((actual.double().cpu() - expected).abs().max()) / scale


def _fitting_rows(report: Report) -> int:
    """ROWS, or what fits: the initial weights, and two contenders' weights and two states."""
    free, _ = torch.cuda.mem_get_info()
    fitting = int(free * 0.85) // (TABLES * DIM * 4 * 7) // 10_000 * 10_000
    if fitting < ROWS:
        report.remarks.append(
            f"lookup: {fitting:,} rows a table instead of {ROWS:,}, to fit the card's memory."
        )
    return min(ROWS, fitting)
