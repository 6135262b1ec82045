"""A collection of unlike tables, a batch for it, and what to compare two of them by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hotbed as hb


def mixed(seed: int | None = 0) -> hb.EmbeddingCollection:
    return hb.EmbeddingCollection(
        [
            hb.Table("item", 5, 20, "mean"),
            hb.Table("user", 3),
            hb.Table("word", 16, None, "none", torch.bfloat16),
            hb.Table("tag", 4, 9, "max", torch.float64),
        ],
        {"watched": "item", "browsed": "item", "user": "user", "word": "word", "tag": "tag"},
        seed=seed,
    )


def batch(size: int = 6, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=g)
    weights = torch.rand(int(lengths.sum()), generator=g)
    watched = torch.randint(0, 20, weights.shape, generator=g)
    return {
        "watched": hb.Jagged(watched, lengths=lengths, weights=weights),
        "browsed": torch.randint(0, 20, (size, 3), generator=g),
        "user": torch.randint(-5, 5, (size,), generator=g) * 10**15,
        "word": torch.randint(0, 50, (size, 2), generator=g, dtype=torch.int32),
        "tag": torch.randint(0, 9, (size, 4), generator=g),
    }


def loss_of(outputs: dict[str, Any]) -> Tensor:
    return sum(((k + 1) * v).pow(2).sum() for k, v in enumerate(outputs.values()))


def grads_of(collection: hb.EmbeddingCollection) -> dict[str, Tensor]:
    return {
        name: p.grad.coalesce()._values().clone()
        for name, p in collection.named_parameters()
        if p.grad is not None
    }


def assert_equal_grads(a: dict[str, Tensor], b: dict[str, Tensor], exact: bool = True) -> None:
    assert a.keys() == b.keys()
    for name, grad in a.items():
        if exact:
            assert torch.equal(grad, b[name]), name
        else:
            torch.testing.assert_close(grad, b[name])
