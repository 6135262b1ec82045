"""Models of `hotbed.models` that ranks share: small batches, models made on meta, statistics of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.worlds import run

import hotbed as hb
from hotbed.models import DIN, MODELS, DeepFM

NAMES = sorted(MODELS)


def made(name: str) -> Any:
    if name == "din":
        tables = [hb.Table("item", 4, combiner=None, padding_idx=-1), "user"]
        named = {"item": "item", "history": "item", "user": "user"}
        return DIN(tables, 4, 1, hidden=[5], features=named, seed=1)
    model: Any = MODELS[name]
    return model(["user", "item"], 4, 1, seed=1)


def batch_of(samples: int, rank: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    shapes = {"user": (samples,), "item": (samples,), "history": (samples, 2)}
    batch = {n: torch.randint(0, 20, shape, generator=draw) for n, shape in shapes.items()}
    return batch | {"dense": torch.randn(samples, 1, generator=draw)}


def uneven(rank: int, world: int, folder: str) -> None:
    for name in NAMES:
        torch.manual_seed(0)
        model = made(name)
        hb.distribute(model)
        optimizer = hb.optim.SGD(model.parameters(), lr=0.01)
        for samples in (0, 1, 3):
            logits = model(batch_of(samples if rank else 3, rank))
            logits.masked_fill(logits.isinf(), 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(value.isfinite().all() for value in model.buffers())
        hb.save(f"{folder}/{name}", model, step=0)
        again = hb.checkpoint.load_model(f"{folder}/{name}")
        if rank == 0:
            for key, value in model.named_buffers():
                assert torch.equal(again.get_buffer(key), value), (name, key)


def without_memory(rank: int, world: int) -> None:
    models = []
    for device in (None, "meta"):
        torch.manual_seed(0)
        models.append(DeepFM(["user", "item"], 4, 1, [8], one_row=True, seed=1, device=device))
        hb.distribute(models[-1])
    batch = batch_of(5, rank)
    assert torch.equal(models[0](batch), models[1](batch))


@pytest.mark.process
def test_ranks_of_no_and_one_sample(tmp_path: Path) -> None:
    run(2, uneven, str(tmp_path))


@pytest.mark.process
def test_tables_of_a_model_take_no_memory_before_it_is_distributed() -> None:
    run(2, without_memory)
