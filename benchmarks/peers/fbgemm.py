"""FBGEMM's split table batched embedding on the CPU, its optimizer fused into backward."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping

import torch

from benchmarks.workload import Workload

OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adagrad": "EXACT_ADAGRAD",
}
EPS = 1e-10
"""torch's default for Adagrad, so that all contenders do the same arithmetic."""


class Fbgemm:
    name = "fbgemm"

    def __init__(self, workload: Workload, optimizer: str, lr: float) -> None:
        self.workload, self.optimizer, self.lr = workload, optimizer, lr

    @staticmethod
    def lacks(optimizer: str) -> str | None:
        if importlib.util.find_spec("fbgemm_gpu") is None:
            return "fbgemm is not installed (make peers)"
        if optimizer not in OPTIMIZERS:
            return f"fbgemm has no {optimizer} on the CPU"
        return None

    def nbytes(self) -> int:
        return self.workload.table_bytes(self.optimizer)

    def build(self) -> None:
        with warnings.catch_warnings():
            # It announces the parts of itself that its own wheel lacks.
            warnings.simplefilter("ignore")
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                EmbeddingLocation,
                SplitTableBatchedEmbeddingBagsCodegen,
            )

        work = self.workload
        spec = (work.rows, work.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * work.tables,
            optimizer=EmbOptimType[OPTIMIZERS[self.optimizer]],
            learning_rate=self.lr,
            eps=EPS,
            stochastic_rounding=False,
            device=torch.device("cpu"),
        )
        for t, weights in enumerate(self.tables.split_embedding_weights()):
            weights.copy_(work.initial_weights(t))
        # One feature after another; made beforehand, though a real loop would pay for it.
        self.batches = [torch.from_numpy(batch.reshape(-1)) for batch in work.ids]
        if work.lengths is None:
            every = torch.arange(0, work.tables * work.batch * work.bag + 1, work.bag)
            self.offsets = [every] * len(self.batches)
        else:
            none = torch.zeros(1, dtype=torch.int64)
            self.offsets = [
                torch.cat([none, torch.from_numpy(lengths.reshape(-1)).cumsum(0)])
                for lengths in work.lengths
            ]
        self.gradient = work.output_gradient()

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.forward, "step": self.step}

    @torch.no_grad()
    def forward(self, i: int) -> torch.Tensor:
        return self._vectors(i)

    def step(self, i: int) -> None:
        self._vectors(i).backward(self.gradient)

    def _vectors(self, i: int) -> torch.Tensor:
        at = i % len(self.batches)
        return self.tables(self.batches[at], self.offsets[at])

    def weights(self, table: int) -> torch.Tensor:
        return self.tables.split_embedding_weights()[table].detach()

    def drop(self) -> None:
        self.tables = self.batches = self.offsets = self.gradient = None
