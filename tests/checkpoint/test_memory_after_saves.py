"""Saving, loading and making an optimizer leave no memory behind."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

import hotbed as hb
from hotbed import _core

MB = 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_saves_and_loads_give_their_memory_back(tmp_path: Path) -> None:
    model = hb.EmbeddingCollection([hb.Table(name, 32) for name in "ab"], seed=0)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    for n in range(20):
        ids = torch.arange(20_000) + 20_000 * n
        vectors = model({"a": ids, "b": ids})
        sum(v.sum() for v in vectors.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    hb.save(tmp_path / "small", torch.nn.Linear(1, 1), step=1)  # what is imported for it stays
    before = resident()
    saved = hb.save(tmp_path, model, optimizer, step=2)
    assert saved.bytes > 200 * MB
    assert resident() - before < 4 * MB
    hb.load(tmp_path, model, optimizer)
    assert resident() - before < 4 * MB


def test_an_optimizer_gives_back_what_filling_tables_has_freed() -> None:
    hb.optim.SGD(hb.EmbeddingBag(4, 4).parameters(), lr=1.0)  # what is imported for it stays
    model = hb.EmbeddingBag(4, 4)
    block = _core.block(64 * MB)
    block.fill_(1)
    del block
    before = resident()
    hb.optim.SGD(model.parameters(), lr=1.0)
    assert before - resident() > 60 * MB
