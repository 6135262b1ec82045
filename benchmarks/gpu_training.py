"""What the trainings of the GPU benchmark share: steps through the public interface, timed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks.gpu_scenarios import Run
from benchmarks.measure import Timing
from benchmarks.steps import timed_steps
from benchmarks.tables import Counts

ALPHA = 1.05
LOOK_AHEAD = {0: "no look-ahead", 2: "look-ahead"}
"""By depth."""
GRAPHS = {False: "", True: ", as a CUDA graph"}

Batch = dict[str, Tensor]


def trained(
    run: Run,
    model: nn.Module,
    optimizer: hb.optim.TableOptimizer,
    batches: Iterator[Batch],
    *,
    gradient: Tensor | None = None,
    amp: bool = False,
    ahead: int = 0,
    before: int = 0,
    graph: bool = False,
) -> Timing:
    """Milliseconds a step, after the warm-up and `before` more steps; ids of tiered tables stay on the
    host.

    `ahead`: depth of look-ahead. `gradient`: of the model's output, in place of a loss. `graph`: the
    step is replayed as a CUDA graph.
    """

    def work(batch: Batch) -> None:
        with torch.autocast(run.device.type, torch.bfloat16, enabled=amp):
            if gradient is not None:
                torch.autograd.backward(model(batch), gradient)
            else:
                batch = _dense_there(batch, run.device)
                out = model(batch)
                loss_of = nn.functional.binary_cross_entropy_with_logits
                loss_of(out.float(), batch["label"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    graphed = hb.graphed(work, optimizer) if graph else None

    def step(batch: Batch) -> None:
        run.check_time()
        (graphed or work)(batch)

    feed: Iterable[Any] = batches
    if ahead:
        feed = hb.lookahead(feed, model, depth=ahead)
    timing = timed_steps(step, feed, run.device, before + run.sizes.warm_up, run.sizes.steps)
    if graphed is not None and not graphed.recorded:
        run.report.remark(
            f"No graph was recorded: {graphed.refused or 'the tables lie on the host'}."
        )
    return timing


def all_there(batch: Batch, device: torch.device) -> Batch:
    return {name: x.to(device) for name, x in batch.items()}


def _dense_there(batch: Batch, device: torch.device) -> Batch:
    """The same tensors but for the dense part, which is copied to the device."""
    dense = {n: x.to(device, non_blocking=True) for n, x in batch.items() if x.is_floating_point()}
    return {**batch, **dense}


def add_counts(run: Run, label: str, before: dict[str, float], after: dict[str, float]) -> None:
    """What the tiers did between two `stats()`."""
    counts = Counts.between(before, after)
    batches = max(counts.batches, 1)
    figures = run.report.figures
    figures[f"{label}: hit rate"] = round(counts.hit_rate, 4)
    figures[f"{label}: rows brought up a step"] = round(counts.missed / batches)
    figures[f"{label}: ms a step moving rows"] = round(counts.move_ms / batches, 2)
