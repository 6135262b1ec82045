"""A small model of several labels, and batches for it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import hotbed as hb

BCE = nn.functional.binary_cross_entropy_with_logits


class Towers(nn.Module):
    """One table and a linear layer of T outputs."""

    def __init__(self, tasks: int, *, one: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = hb.EmbeddingCollection([hb.Table("user", dim=4)])
        self.layer = nn.Linear(4 + 3, tasks)
        self.one = one
        """Return (B,) and not (B, 1)."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors = self.embeddings({"user": batch["user"]})["user"]
        z: Tensor = self.layer(torch.cat([vectors, batch["dense"]], 1))
        return z[:, 0] if self.one else z


def labels_of(rows: int, tasks: int, missing: float, generator: torch.Generator) -> Tensor:
    labels = torch.randint(0, 2, (rows, tasks), generator=generator).float()
    labels[torch.rand(rows, tasks, generator=generator) < missing] = math.nan
    return labels


def batches(
    count: int = 6, rows: int = 16, tasks: int = 2, missing: float = 0.3, seed: int = 1
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "user": torch.randint(0, 30, (rows,), generator=generator),
            "dense": torch.randn(rows, 3, generator=generator),
            "label": labels_of(rows, tasks, missing, generator),
        }
        for _ in range(count)
    ]


def one_label(count: int = 6, rows: int = 16, seed: int = 1) -> list[dict[str, Tensor]]:
    found = batches(count, rows, 1, 0.0, seed)
    return [{**batch, "label": batch["label"][:, 0]} for batch in found]


def optimizer_of(model: nn.Module, lr: float = 0.05) -> hb.optim.Adagrad:
    return hb.optim.Adagrad(model.parameters(), lr=lr)
