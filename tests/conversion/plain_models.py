"""Models of plain torch layers, their batches and their training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotbed as hb

ROWS, DIM, COLUMNS = 2000, 8, 4


class Click(nn.Module):
    """One layer a column, a bag over three of them, a small layer, a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.embs = nn.ModuleDict({f"C{i}": nn.Embedding(ROWS + i, DIM) for i in range(COLUMNS)})
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.small = nn.Embedding(5, DIM)
        self.top = nn.Linear(DIM * (COLUMNS + 2), 1)

    def forward(self, x: Tensor) -> Tensor:
        vectors = [self.embs[f"C{i}"](x[:, i : i + 1].long()).squeeze(1) for i in range(COLUMNS)]
        vectors += [self.bag(x[:, :3].long()), self.small(x[:, 0].long() % 5)]
        logits: Tensor = self.top(torch.cat(vectors, 1)).squeeze(1)
        return logits


def click_ids(x: Tensor) -> dict[str, Tensor]:
    found = {f"embs.C{i}": x[:, i : i + 1].long() for i in range(COLUMNS)}
    return {**found, "bag": x[:, :3].long()}


def made(kind: type[nn.Module] = Click) -> Any:
    torch.manual_seed(0)
    return kind()


def batch_of(number: int, size: int = 32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(0, ROWS, (size, COLUMNS), generator=draw).float()
    return ids, torch.randint(0, 2, (size,), generator=draw).float()


def train(model: nn.Module, optimizer: Any, numbers: Iterable[int]) -> list[float]:
    """Return the losses."""
    losses = []
    for number in numbers:
        x, y = batch_of(number)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def storage(folder: Path) -> hb.Storage:
    """Less than the rows take."""
    return hb.Storage(host=1_200_000, ssd=folder / "rows")
