"""Hotbed through its public module and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.workload import Workload

OPTIMIZERS = {
    "sgd": "SGD",
    "rowwise_adagrad": "RowwiseAdagrad",
    "adagrad": "Adagrad",
    "adam": "Adam",
}
INDEX_BYTES_A_ROW = 32
"""What a dynamic table keeps beside the row: its id, and its place in the index while it grows."""


class HotbedTables:
    """Static tables; with `dynamic`, tables of open-ended ids that all the batches have met; with
    `fused`, tables that are updated during backward, as FBGEMM's are."""

    def __init__(
        self,
        workload: Workload,
        optimizer: str,
        lr: float,
        *,
        dynamic: bool = False,
        fused: bool = False,
    ) -> None:
        self.workload, self.optimizer, self.lr = workload, optimizer, lr
        self.dynamic, self.fused = dynamic, fused
        self.name = "dynamic" if dynamic else "hotbed fused" if fused else "hotbed"

    @staticmethod
    def lacks(optimizer: str) -> str | None:
        return None

    def nbytes(self) -> int:
        tables = self.workload.table_bytes(self.optimizer)
        if self.dynamic:
            tables += self.workload.tables * self.workload.rows * INDEX_BYTES_A_ROW
        return tables

    def build(self) -> None:
        import hotbed as hb

        work = self.workload
        names = [f"t{t}" for t in range(work.tables)]
        rows = None if self.dynamic else work.rows
        self.embeddings = self.shared(
            hb.EmbeddingCollection(
                [hb.Table(name, dim=work.dim, rows=rows, combiner="sum") for name in names], seed=0
            )
        )
        ids = self.ids_to_assign()
        for t, name in enumerate(names):
            self.embeddings.assign(name, ids, work.initial_weights(t)[ids])
        rule = getattr(hb.optim, OPTIMIZERS[self.optimizer])
        self.stepper = rule(self.embeddings.parameters(), lr=self.lr, fused=self.fused)
        shape = (work.batch, work.bag) if work.bag > 1 else (work.batch,)

        def bags(b: int, t: int) -> object:
            ids = torch.from_numpy(work.ids[b, t])
            if work.lengths is None:
                return ids.view(shape)
            return hb.Jagged(ids, lengths=torch.from_numpy(work.lengths[b, t]))

        self.batches = [
            {name: bags(b, t) for t, name in enumerate(names)} for b in range(len(work.ids))
        ]
        gradient = work.output_gradient().view(work.batch, work.tables, work.dim)
        self.gradients = [part.contiguous() for part in gradient.unbind(1)]

    def shared(self, embeddings: Any) -> Any:
        """The tables as they are trained."""
        return embeddings

    def ids_to_assign(self) -> torch.Tensor:
        return torch.arange(self.workload.rows)

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.forward, "step": self.step}

    def forward(self, i: int) -> dict[str, torch.Tensor]:
        self.embeddings.eval()
        with torch.no_grad():
            return self.embeddings(self.batches[i % len(self.batches)])

    def step(self, i: int) -> None:
        self.embeddings.train()
        vectors = self.embeddings(self.batches[i % len(self.batches)])
        torch.autograd.backward(list(vectors.values()), self.gradients)
        self.stepper.step()
        self.stepper.zero_grad()

    def weights(self, table: int) -> torch.Tensor:
        return self.embeddings.lookup(f"t{table}", torch.arange(self.workload.rows)).detach()

    def drop(self) -> None:
        self.embeddings = self.stepper = None
        self.batches = self.gradients = []
