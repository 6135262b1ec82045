"""`torch.nn.EmbeddingBag(sparse=True)` with torch's optimizers that take sparse gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch

from benchmarks.workload import Workload

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.SparseAdam,
}


class TorchBags:
    name = "torch"

    def __init__(self, workload: Workload, optimizer: str, lr: float) -> None:
        self.workload, self.optimizer, self.lr = workload, optimizer, lr

    @staticmethod
    def lacks(optimizer: str) -> str | None:
        if optimizer in OPTIMIZERS:
            return None
        return f"torch has no {optimizer} for sparse gradients"

    def nbytes(self) -> int:
        return self.workload.table_bytes(self.optimizer)

    def build(self) -> None:
        # torch announces once that it does not check its own sparse tensors.
        warnings.filterwarnings("ignore", message=".*[Ss]parse invariant.*")
        work = self.workload
        self.bags = [
            torch.nn.EmbeddingBag.from_pretrained(
                work.initial_weights(t), freeze=False, mode="sum", sparse=True
            )
            for t in range(work.tables)
        ]
        weights = [bag.weight for bag in self.bags]
        self.stepper = OPTIMIZERS[self.optimizer](weights, lr=self.lr)

        def bags(b: int, t: int) -> tuple[torch.Tensor, ...]:
            ids = torch.from_numpy(work.ids[b, t])
            if work.lengths is None:
                return (ids.view(work.batch, work.bag),)
            lengths = torch.from_numpy(work.lengths[b, t])
            return ids, lengths.cumsum(0) - lengths

        self.batches = [[bags(b, t) for t in range(work.tables)] for b in range(len(work.ids))]
        self.gradients = list(
            work.output_gradient().view(work.batch, work.tables, work.dim).unbind(1)
        )
        self.gradients = [gradient.contiguous() for gradient in self.gradients]

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.forward, "step": self.step}

    @torch.no_grad()
    def forward(self, i: int) -> list[torch.Tensor]:
        ids = self.batches[i % len(self.batches)]
        return [bag(*x) for bag, x in zip(self.bags, ids, strict=True)]

    def step(self, i: int) -> None:
        ids = self.batches[i % len(self.batches)]
        outputs = [bag(*x) for bag, x in zip(self.bags, ids, strict=True)]
        torch.autograd.backward(outputs, self.gradients)
        self.stepper.step()
        self.stepper.zero_grad()

    def weights(self, table: int) -> torch.Tensor:
        return self.bags[table].weight.detach()

    def drop(self) -> None:
        self.bags = self.batches = self.gradients = []
        self.stepper = None
