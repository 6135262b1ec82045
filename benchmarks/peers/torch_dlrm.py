"""A DLRM of stock torch parts: what a careful user writes without Hotbed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

COLUMNS = tuple(f"C{i}" for i in range(1, 27))
DENSE = 13
INITIAL_STD = 0.01


class Vocabulary:
    """Row numbers for the ids of each column: the pass over the data that static tables need."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.ids = {
            c: np.unique(np.concatenate([batch[c].numpy() for batch in batches])) for c in COLUMNS
        }

    def rows(self) -> list[int]:
        return [len(self.ids[c]) for c in COLUMNS]

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with row numbers in place of ids."""
        known = {
            c: torch.from_numpy(np.searchsorted(self.ids[c], batch[c].numpy())) for c in COLUMNS
        }
        return {**batch, **known}


class TorchDlrm(nn.Module):
    """26 sparse `nn.Embedding`, bottom 13-64-dim, dot interaction of 27 vectors, top 256-128-1."""

    def __init__(self, rows: list[int], dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim, sparse=True) for n in rows)
        for table in self.tables:
            nn.init.normal_(table.weight, std=INITIAL_STD)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        vectors = 1 + len(rows)
        pairs = vectors * (vectors - 1) // 2
        hidden = (nn.Linear(dim + pairs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.top = nn.Sequential(*hidden, nn.Linear(128, 1))
        below = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("below", below, persistent=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        dense = self.bottom(batch["dense"])  # (B, dim)
        embedded = [table(batch[c]) for table, c in zip(self.tables, COLUMNS, strict=True)]
        stacked = torch.stack([dense, *embedded], dim=1)  # (B, 27, dim)
        dots = stacked @ stacked.transpose(1, 2)  # (B, 27, 27)
        return self.top(torch.cat([dense, dots[:, self.below[0], self.below[1]]], 1)).squeeze(1)


class TwoAdams:
    """SparseAdam for the tables and Adam for the rest, as torch wants it.

    SparseAdam adds eps to sqrt(v), Adam to sqrt(v) / sqrt(1 - beta2**t): in the first thousand
    steps SparseAdam's eps weighs up to 32 times as much, which small gradients feel. With
    `eps_as_adam` the tables' eps is shrunk at each step so that both mean the same.
    """

    def __init__(self, model: TorchDlrm, lr: float, *, eps_as_adam: bool = False) -> None:
        tables = list(model.tables.parameters())
        dense = [*model.bottom.parameters(), *model.top.parameters()]
        self.parts = (torch.optim.SparseAdam(tables, lr=lr), torch.optim.Adam(dense, lr=lr))
        self.eps_as_adam = eps_as_adam
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.eps_as_adam:
            (group,) = self.parts[0].param_groups
            group["eps"] = (
                self.parts[0].defaults["eps"] * (1 - group["betas"][1] ** self.steps) ** 0.5
            )
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()
