"""The step that the table benchmarks measure: tables, power-law batches, output gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

BATCHES = 8
"""Batches that are cycled through, so that a step does not find its rows in the caches."""

DISTINCT_ROWS = 10_000

STATE_FLOATS = {
    "sgd": lambda dim: 0,
    "rowwise_adagrad": lambda dim: 1,
    "adagrad": lambda dim: dim,
    "adam": lambda dim: 2 * dim,
}
"""Floats of optimizer state a row."""


@dataclass(frozen=True)
class Workload:
    """T tables of `rows` x `dim` float32 and BATCHES batches of `batch` bags of `bag` ids each; `ragged`:
    of 0 to 2 `bag`, and that many on average."""

    tables: int
    rows: int
    dim: int
    batch: int
    bag: int
    alpha: float = 1.05
    seed: int = 0
    ragged: bool = False
    lengths: np.ndarray | None = field(init=False, repr=False, default=None)
    """Of ragged bags: int64 (BATCHES, T, batch)."""
    ids: np.ndarray = field(init=False, repr=False)  # int64 (BATCHES, T, batch * bag)
    unique_rows: float = field(init=False)  # a batch, over all tables; mean over the batches

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        count = self.batch * self.bag
        ids = np.empty((BATCHES, self.tables, count), np.int64)
        for t in range(self.tables):
            ranks = power_law_ranks(rng, BATCHES * count, self.rows, self.alpha)
            ids[:, t] = rng.permutation(self.rows)[ranks].reshape(BATCHES, count)
        unique = sum(len(np.unique(ids[b, t])) for b in range(BATCHES) for t in range(self.tables))
        object.__setattr__(self, "ids", ids)
        if self.ragged:
            object.__setattr__(self, "lengths", self._lengths(rng))
        object.__setattr__(self, "unique_rows", unique / BATCHES)

    def _lengths(self, rng: np.random.Generator) -> np.ndarray:
        lengths = rng.integers(0, 2 * self.bag + 1, (BATCHES, self.tables, self.batch))
        for of_table in lengths.reshape(-1, self.batch):  # so that all have as many ids
            while (missing := self.batch * self.bag - int(of_table.sum())) != 0:
                step = 1 if missing > 0 else -1
                can = np.flatnonzero(of_table < 2 * self.bag if step > 0 else of_table > 0)
                of_table[rng.choice(can, min(abs(missing), len(can)), replace=False)] += step
        return lengths

    def share(self, rank: int, world: int) -> Workload:
        """The samples of one of `world` ranks, all of which draw from the same hot rows."""
        assert not self.ragged and self.batch % world == 0
        count = self.batch * self.bag // world
        made = copy.copy(self)
        object.__setattr__(made, "batch", self.batch // world)
        object.__setattr__(made, "ids", self.ids[:, :, rank * count : (rank + 1) * count].copy())
        unique = [len(np.unique(of_table)) for batch in made.ids for of_table in batch]
        object.__setattr__(made, "unique_rows", sum(unique) / BATCHES)
        return made

    @property
    def shape(self) -> str:
        bag = f"0 to {2 * self.bag}" if self.ragged else self.bag
        return f"{self.tables} x {self.rows:,} x {self.dim}, batch {self.batch} x {bag}"

    def initial_weights(self, table: int) -> torch.Tensor:
        """float32 (rows, dim): the same for every contender that asks.

        A block of random rows again and again: drawing each row anew would take longer than the
        measurement, and no contender's time depends on the values.
        """
        generator = torch.Generator().manual_seed(self.seed * 1000 + table)
        block = torch.empty(min(self.rows, DISTINCT_ROWS), self.dim)
        block.uniform_(-0.01, 0.01, generator=generator)
        return block.repeat(-(-self.rows // len(block)), 1)[: self.rows]

    def output_gradient(self) -> torch.Tensor:
        """float32 (batch, T * dim): fixed, so that backward's work does not depend on a loss."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.batch, self.tables * self.dim, generator=generator)

    def table_bytes(self, optimizer: str) -> int:
        """Weights and states of all tables."""
        return self.tables * self.rows * 4 * (self.dim + STATE_FLOATS[optimizer](self.dim))

    def forward_bytes(self) -> float:
        """The least a forward must move: ids and each row it needs in, the pooled vectors out."""
        ids = 8 * self.tables * self.batch * self.bag
        return ids + 4 * self.dim * (self.unique_rows + self.tables * self.batch)

    def step_bytes(self, optimizer: str) -> float:
        """The least a training step must move.

        The forward, plus the output gradients in, plus each touched row and its states in and out.
        The row is counted as read twice: what the forward read has left the caches meanwhile.
        """
        gradients = 4 * self.dim * self.tables * self.batch
        row = 4 * (self.dim + STATE_FLOATS[optimizer](self.dim))
        return self.forward_bytes() + gradients + 2 * row * self.unique_rows


def least_step_bytes(inputs: Iterable[tuple[str, torch.Tensor, int]], optimizer: str) -> float:
    """The least that a training step must move for its tables, as in `Workload.step_bytes`.

    `inputs`: for each feature its table, its ids (bags, ...), and the table's dim.
    """
    total = 0.0
    ids_of: dict[str, list[torch.Tensor]] = {}
    dims: dict[str, int] = {}
    for table, ids, dim in inputs:
        ids_of.setdefault(table, []).append(ids.reshape(-1))
        dims[table] = dim
        total += 8 * ids.numel() + 2 * 4 * dim * len(ids)  # ids, vectors and their gradients
    for table, parts in ids_of.items():
        rows, dim = len(torch.unique(torch.cat(parts))), dims[table]
        total += 4 * rows * (dim + 2 * (dim + STATE_FLOATS[optimizer](dim)))
    return total


def power_law_ranks(rng: np.random.Generator, count: int, rows: int, alpha: float) -> np.ndarray:
    """Ranks 0 .. rows-1 with density proportional to (rank + 1)**-alpha, alpha not 1.

    By inversion of the continuous distribution on [1, rows + 1), as in the synthetic models of
    NVIDIA's distributed-embeddings.
    """
    gamma = 1.0 - alpha
    uniform = rng.random(count)
    x = (uniform * ((rows + 1.0) ** gamma - 1.0) + 1.0) ** (1.0 / gamma)
    return np.minimum(x.astype(np.int64) - 1, rows - 1)
