"""Rows that were saved behind their optimizer, loaded without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kept_in import storage_of

import hotbed as hb

ROWS = 300


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize(("kept", "loaded"), [("memory", "ssd"), ("ssd", "memory")])
def test_in_another_dtype_they_are_the_nearest_of_what_they_were(
    tmp_path: Path, dtype: torch.dtype, rows: int | None, kept: str, loaded: str
) -> None:
    def made(of: torch.dtype, place: str) -> hb.EmbeddingCollection:
        table = hb.Table("a", 16, rows, dtype=of, init=hb.init.Normal(0.0, 1.0), padding_idx=4)
        storage = storage_of(place, tmp_path / place)
        return hb.EmbeddingCollection([table], seed=1, storage=storage)

    model = made(torch.float32, kept)
    optimizer = hb.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, untouched="exact")
    for ids in ([1, 2, 3, 4], [1], [7], [7], [7]):
        model({"a": torch.tensor(ids)})["a"].sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hb.save(tmp_path / "run", model, optimizer, step=5)
    other = made(dtype, loaded)
    hb.load(tmp_path / "run", other)
    found, expected = other.rows("a"), model.rows("a")
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values.to(dtype))


@pytest.mark.parametrize("rule, options", [("FTRL", {}), ("SGD", {"weight_decay": 0.1})])
@pytest.mark.parametrize("kept", ["memory", "host", "ssd"])
def test_rows_that_no_batch_has_had(
    tmp_path: Path, rule: str, options: dict[str, float], kept: str
) -> None:
    """Tiers do not save them; steps of FTRL make them 0."""

    def made(place: str) -> hb.EmbeddingCollection:
        table = hb.Table("a", 4, ROWS, init=hb.init.Normal(0.0, 1.0))
        storage = storage_of(place, tmp_path / place)
        return hb.EmbeddingCollection([table], seed=1, storage=storage)

    model = made(kept)
    optimizer = getattr(hb.optim, rule)(model.parameters(), lr=0.1, untouched="exact", **options)
    for _ in range(3):
        model({"a": torch.tensor([1, 2])})["a"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hb.save(tmp_path / "run", model, optimizer, step=3)
    other = made("memory")
    hb.load(tmp_path / "run", other)
    every = torch.arange(ROWS)
    expected = model.lookup("a", every)
    assert torch.equal(other.lookup("a", every), expected)
    assert not torch.equal(expected[5:], made("memory").lookup("a", every)[5:])
