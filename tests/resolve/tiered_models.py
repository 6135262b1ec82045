"""Small models whose tables lie in two tiers, and loaders for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hotbed as hb

ROWS = 300
NARROW = 60_000  # bytes: room for four batches of 60, and not for all rows


def storage(device: int = 200_000) -> hb.Storage:
    return hb.Storage(device=device, host="16MB")


class Model(nn.Module):
    """A static and a dynamic table, and one dense parameter."""

    def __init__(self, storage: hb.Storage | None = None) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(
            [hb.Table("item", 4, ROWS), hb.Table("user", 4)], seed=0, storage=storage
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Tensor:
        vectors = self.embeddings({name: batch[name] for name in ("item", "user")})
        return sum(v.sin().sum() for v in vectors.values()) * self.scale


def batches(count: int, size: int = 20, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "item": torch.randint(0, ROWS, (size,), generator=generator),
            "user": torch.randint(0, 10**12, (size,), generator=generator) % 500,
            "label": torch.rand(size, generator=generator),
        }
        for _ in range(count)
    ]


def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(model: nn.Module, optimizer: Any, data: Any) -> list[float]:
    return [step(model, optimizer, batch) for batch in data]


def adagrad(model: nn.Module) -> Any:
    return hb.optim.Adagrad(model.parameters(), lr=0.1)


def twins(device: int = NARROW, **options: Any) -> tuple[list[Model], list[Any]]:
    """A model without tiers and one with, and their optimizers."""
    models = [Model(), Model(storage(device))]
    return models, [hb.optim.Adam(m.parameters(), lr=0.01, **options) for m in models]


def both(models: list[Model], optimizers: list[Any], batch: Any) -> None:
    losses = [step(m, o, batch) for m, o in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1]


def expected(data: Any) -> list[float]:
    """The losses of a training without tiers."""
    model = Model()
    return train(model, adagrad(model), data)


def everything(model: nn.Module) -> dict[str, hb.Rows]:
    return {name: model.embeddings.rows(name) for name in model.embeddings.tables}


def assert_same_rows(model: nn.Module, other: nn.Module) -> None:
    theirs = everything(other)
    for name, rows in everything(model).items():
        assert torch.equal(rows.ids, theirs[name].ids), name
        assert torch.equal(rows.values, theirs[name].values), name


def prepared(stats: dict[str, float]) -> float:
    """Batches that look-ahead had ready, in time or not."""
    return stats["batches"] - stats["batches_unprepared"]


def lookahead_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("hotbed-lookahead")]


def pinned(model: nn.Module) -> int:
    """Slots that batches hold, in all row spaces, once the next forward has looked."""
    model.embeddings.group.tiers.release_spent()
    return sum(model.embeddings.group.tiers.core.pinned())


class Once:
    """A loader that is its own iterator: what was read does not come again."""

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = iter(data)
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.data)
        self.read += 1
        return batch
