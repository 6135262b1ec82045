"""NVIDIA's synthetic models, trained through the public interface on power-law ids."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks.machine import free_bytes
from benchmarks.measure import Timing
from benchmarks.report import Report
from benchmarks.steps import default_device, timed_steps
from benchmarks.synthetic_models import MODELS, SyntheticModel, synthetic_model
from benchmarks.workload import STATE_FLOATS, least_step_bytes, power_law_ranks

WARM_UP, STEPS, BATCHES = 5, 30, 10
QUICK_ROWS, QUICK_BATCH, QUICK_STEPS = 10_000, 1024, 5
ALPHA = 1.05
SHARE_OF_MEMORY = 0.9
# As the models' own driver sets them: SGD 0.03, the others Keras' default.
OPTIMIZERS: dict[str, Callable[[object], torch.optim.Optimizer]] = {
    "sgd": lambda params: hb.optim.SGD(params, lr=0.03),
    "adagrad": lambda params: hb.optim.Adagrad(
        params, lr=0.001, initial_accumulator_value=0.1, eps=1e-7
    ),
    "adam": lambda params: hb.optim.Adam(params, lr=0.001, eps=1e-7),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--batch-size", type=int, default=65536, metavar="B")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps")
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    parser.add_argument("--most-rows", type=int, metavar="N", help="cut larger tables to N rows")


@dataclass(frozen=True)
class Input:
    """One input of the model: `hotness` ids of a table in every sample."""

    name: str
    table: str
    rows: int
    dim: int
    hotness: int


def run(
    *,
    quick: bool,
    progress: Callable[[str], None],
    model: str = "tiny",
    optimizer: str = "adagrad",
    batch_size: int = 65536,
    steps: int = STEPS,
    device: str | None = None,
    most_rows: int | None = None,
) -> Report:
    where = default_device() if device is None else torch.device(device)
    described = synthetic_model(model)
    report = Report("synthetic", quick)
    if quick:
        most_rows, batch_size, steps = most_rows or QUICK_ROWS, QUICK_BATCH, QUICK_STEPS
    if most_rows:
        described = described.scaled(most_rows)
        report.remarks.append(f"Tables are cut to {most_rows:,} rows.")
    _check_memory(described, optimizer, where)
    progress("making the model")
    torch.manual_seed(0)
    network = Network(described, device=where)
    stepper = OPTIMIZERS[optimizer](network.parameters())
    progress("drawing batches")
    batches = [drawn(described, batch_size, seed) for seed in range(3 if quick else BATCHES)]
    there = [{name: x.to(where) for name, x in batch.items()} for batch in batches]
    timing, losses = train(network, stepper, there, steps, where, progress)
    config = (
        f"{model}, {optimizer}, batch {batch_size:,}, {described.parameters:,} weights, {where}"
    )
    report.add("hotbed", config, timing, step_bytes(described, batches, optimizer))
    report.figures = {
        "tables": described.tables,
        "inputs": described.inputs,
        "rows": described.rows,
        "GiB of tables": round(described.parameters * 4 / 2**30, 2),
        "ids a sample": described.lookups,
        "initial loss": round(losses[0], 5),
        "loss": round(losses[-1], 5),
        "steps": len(losses),
        "ms an iteration": round(timing.median, 2),
        "samples a second": round(batch_size / timing.median * 1e3),
    }
    report.remarks.append(
        f"{len(batches)} batches are cycled, drawn beforehand; ids by a power law with exponent "
        f"{ALPHA}, labels by chance, so the loss has little to fall to. The floor counts the tables "
        "only. On one A100-80GB NVIDIA states 17.6 ms for tiny and 57.8 ms for small at batch "
        "65,536 with Adagrad (a later page: 24.4 and 67.4)."
    )
    return report


class Network(nn.Module):
    """The model: sums of rows side by side, numerical features, a ReLU MLP, one logit."""

    def __init__(
        self, model: SyntheticModel, storage: hb.Storage | None = None, device: Any = None
    ) -> None:
        super().__init__()
        self.stride = model.stride
        tables, self.inputs = described_tables(model)
        features = {i.name: i.table for i in self.inputs}
        self.embeddings = hb.EmbeddingCollection(
            tables, features, seed=0, storage=storage, device=device
        )
        self.mlp = hb.nn.MLP(model.mlp_input, [*model.mlp, 1])
        for layer in self.mlp.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.to(device)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.embeddings({i.name: batch[i.name] for i in self.inputs})
        joined_BD = hb.nn.concat(vectors)
        if self.stride is not None:
            joined_BD = averaged(joined_BD, self.stride)
        logits: Tensor = self.mlp(torch.cat([joined_BD, batch["numerical"]], 1)).squeeze(1)
        return logits


def described_tables(model: SyntheticModel) -> tuple[list[hb.Table], list[Input]]:
    """The model's tables and inputs, in the order of its definition."""
    tables, inputs = [], []
    for g, group in enumerate(model.groups):
        for t in range(group.tables):
            name = f"{g}.{t}"
            first = hb.init.Uniform(-0.05, 0.05)
            tables.append(hb.Table(name, group.dim, group.rows, "sum", init=first))
            for hotness in group.hotness:
                inputs.append(Input(f"{name} x {hotness}", name, group.rows, group.dim, hotness))
    return tables, inputs


def averaged(x: Tensor, stride: int) -> Tensor:
    """(B, D) → (B, ⌈D / stride⌉): means over neighbouring columns, at the edges of fewer.

    As Keras' AveragePooling1D with padding "same": what is missing is missing on both sides.
    """
    width = x.shape[1]
    count = -(-width // stride)
    left = (count * stride - width) // 2
    right = count * stride - width - left
    sums = nn.functional.pad(x, (left, right)).view(-1, count, stride).sum(2)
    sizes = x.new_full((count,), stride)
    sizes[0] -= left
    sizes[-1] -= right
    return sums / sizes


def drawn(model: SyntheticModel, batch: int, seed: int) -> dict[str, Tensor]:
    """A batch: ids (B, hotness) a power law of each table's rows, numbers and labels by chance."""
    rng = np.random.default_rng(seed)
    made: dict[str, Tensor] = {}
    for one in described_tables(model)[1]:
        ids = power_law_ranks(rng, batch * one.hotness, one.rows, ALPHA)
        made[one.name] = torch.from_numpy(ids).view(batch, one.hotness)
    made["numerical"] = torch.from_numpy(rng.random((batch, model.numerical), np.float32) * 100)
    made["label"] = torch.from_numpy(rng.integers(0, 2, batch).astype(np.float32))
    return made


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, Tensor]],
    steps: int,
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[Timing, list[float]]:
    """Milliseconds of `steps` steps after the warm-up, and the loss of every step."""
    losses: list[Tensor] = []

    def step(batch: dict[str, Tensor]) -> None:
        progress(f"step {len(losses) + 1} of {WARM_UP + steps}")
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    timing = timed_steps(step, itertools.cycle(batches), device, WARM_UP, steps)
    return timing, torch.stack(losses).tolist()


def step_bytes(model: SyntheticModel, batches: list[dict[str, Tensor]], optimizer: str) -> float:
    """The least that a step must move for the tables."""
    inputs = described_tables(model)[1]
    batch = batches[0]
    return least_step_bytes([(one.table, batch[one.name], one.dim) for one in inputs], optimizer)


def _check_memory(model: SyntheticModel, optimizer: str, device: torch.device) -> None:
    """Refuses tables that the memory cannot hold."""
    needed = sum(
        4 * group.tables * group.rows * (group.dim + STATE_FLOATS[optimizer](group.dim))
        for group in model.groups
    )
    room = free_bytes(device) * SHARE_OF_MEMORY
    if needed > room:
        raise SystemExit(
            f"{model.name} with {optimizer} takes {needed / 1e9:.1f} GB and {room / 1e9:.1f} GB are "
            "there. Pass --most-rows to cut its tables."
        )
