"""What a collection over an SSD takes stays within its budget, also where that is small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hotbed as hb

IDS = 30_000


@pytest.mark.parametrize("host", [4_000_000, 8_000_000, 16_000_000])
@pytest.mark.parametrize("dims", [(16,), (16, 16, 16, 16), (16, 8, 4, 32), (300, 300, 300)])
@pytest.mark.parametrize("rule", ["SGD", "Adagrad", "Adam"])
def test_memory_stays_within_the_budget(
    tmp_path: Path, host: int, dims: tuple[int, ...], rule: str
) -> None:
    tables = [hb.Table(f"t{k}", dim) for k, dim in enumerate(dims)]
    storage = hb.Storage(host=host, ssd=tmp_path)
    embeddings = hb.EmbeddingCollection(tables, seed=0, storage=storage)
    optimizer = getattr(hb.optim, rule)(embeddings.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    size = 100 if max(dims) > 100 else 500
    for _ in range(40):
        batch = {t.name: torch.randint(0, IDS, (size,), generator=generator) for t in tables}
        sum(vectors.sum() for vectors in embeddings(batch).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert embeddings.stats()["memory_bytes"] <= host
    embeddings.flush()
    assert host / 4 < embeddings.stats()["memory_bytes"] <= host or dims == (16,)
