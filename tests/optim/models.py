"""A small model in two forms, Hotbed's and plain torch's, with equal weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hotbed as hb

ROWS, DIM = 30, 6

ALL = [kind.__name__ for kind in hb.optim.RULES]

Batch = dict[str, Tensor]


class Model(nn.Module):
    """Two tables (the second dynamic if asked), three features, one linear layer."""

    def __init__(self, dynamic: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(
            [
                hb.Table("item", dim=DIM, rows=ROWS, combiner="sum", dtype=dtype),
                hb.Table("user", dim=DIM, rows=None if dynamic else ROWS, dtype=dtype),
            ],
            features={"watched": "item", "browsed": "item", "user": "user"},
            seed=3,
        )
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        self.top = nn.Linear(3 * DIM, 1, dtype=compute)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for p in self.top.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=compute) / 4)

    def forward(self, batch: Batch) -> Tensor:
        vectors = self.embeddings(batch)
        return self.top(torch.cat([vectors[f] for f in ("watched", "browsed", "user")], 1))[:, 0]


class Twin(nn.Module):
    """The same in plain torch, with the first values of `model`'s rows."""

    def __init__(self, model: Model, sparse: bool = False) -> None:
        super().__init__()
        ids = torch.arange(ROWS)
        for name in ("item", "user"):
            weight = model.embeddings.lookup(name, ids).clone()
            layer = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=sparse, _weight=weight)
            self.add_module(name, layer)
        self.top = nn.Linear(3 * DIM, 1, dtype=model.top.weight.dtype)
        self.top.load_state_dict(model.top.state_dict())

    def forward(self, batch: Batch) -> Tensor:
        vectors = [self.item(batch["watched"]), self.item(batch["browsed"])]
        user = batch["user"]
        vectors.append(self.user(user if user.dim() == 2 else user[:, None]))
        return self.top(torch.cat(vectors, 1))[:, 0]


def batches(count: int, seed: int = 0, size: int = 8) -> Iterator[tuple[Batch, Tensor]]:
    """Batches with duplicates and gaps: ids follow a steep power law."""
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return (ROWS * torch.rand(*shape, generator=generator) ** 3).long()

    for _ in range(count):
        batch = {"watched": ids(size, 3), "browsed": ids(size, 2), "user": ids(size)}
        yield batch, torch.randn(size, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    """The loss of one batch."""
    batch, label = next(batches(1, seed))
    out = model(batch)
    loss: Tensor = (out - label.to(out.dtype)).square().mean()
    return loss


def backward(model: nn.Module, seed: int = 0) -> Tensor:
    """The same, after its backward."""
    loss = loss_of(model, seed)
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module, optimizer: Any, data: Any, schedule: Any = None, backwards: int = 1
) -> list[float]:
    """The losses of one step a batch (or a step every `backwards` batches)."""
    losses = []
    for i, (batch, label) in enumerate(data):
        out = model(batch)
        loss = (out - label.to(out.dtype)).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if (i + 1) % backwards == 0:
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    return losses


def tables_of(model: Model) -> dict[str, Tensor]:
    ids = torch.arange(ROWS)
    return {name: model.embeddings.lookup(name, ids) for name in ("item", "user")}


def assert_same(model: Model, twin: Twin, tolerance: float) -> None:
    for name, rows in tables_of(model).items():
        torch.testing.assert_close(
            rows, getattr(twin, name).weight.detach(), rtol=0, atol=tolerance, msg=name
        )
    torch.testing.assert_close(
        model.top.weight.detach(), twin.top.weight.detach(), rtol=0, atol=tolerance
    )
