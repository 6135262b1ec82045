"""Scenarios `synthetic ...` of the GPU benchmark: NVIDIA's synthetic models, all in GPU memory."""

from __future__ import annotations

import functools
import itertools

from benchmarks import synthetic
from benchmarks.gpu_scenarios import Run, Scenario
from benchmarks.gpu_sizes import Sizes
from benchmarks.gpu_training import GRAPHS, all_there, trained
from benchmarks.synthetic_models import synthetic_model

PUBLISHED = (
    "synthetic: NVIDIA states 17.6 ms (tiny) and 57.8 ms (small) on one A100-80GB, on a later page "
    "24.4 and 67.4, and 42.7 ms for tiny on one T4."
)


def scenarios(sizes: Sizes) -> list[Scenario]:
    return [
        Scenario(f"synthetic {name}", functools.partial(_measure, name=name), seconds=20)
        for name in sizes.synthetic
    ]


def _measure(run: Run, name: str) -> None:
    sizes, report = run.sizes, run.report
    report.remark(PUBLISHED)
    run.doing(f"synthetic {name}: making the model")
    model = synthetic_model(name)
    if sizes.synthetic_most_rows:
        model = model.scaled(sizes.synthetic_most_rows)
    needed = 2 * 4 * model.parameters
    if needed > run.device_room():
        report.skipped[f"synthetic {name}"] = (
            f"takes {needed / 1e9:.0f} GB, more than this card has"
        )
        return
    network = synthetic.Network(model, device=run.device)
    optimizer = synthetic.OPTIMIZERS["adagrad"](network.parameters())
    batches = [synthetic.drawn(model, sizes.batch, seed) for seed in range(sizes.batches)]
    moved = synthetic.step_bytes(model, batches, "adagrad")
    there = [all_there(batch, run.device) for batch in batches]
    run.doing(f"synthetic {name}: training")
    for graph, launched in GRAPHS.items():
        timing = trained(run, network, optimizer, itertools.cycle(there), graph=graph)
        run.add(f"synthetic {name}, adagrad{launched}, batch {sizes.batch:,}", timing, moved)
