"""Rows on SSD: the same results as in memory, and a folder that serves one run."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import hotbed as hb
from hotbed.cli.inspect import contents, inspect


def train(
    storage: hb.Storage | None, ahead: bool, optimizer: str, **options: Any
) -> tuple[list[float], dict[str, Any], dict[str, float]]:
    """Losses, rows and counters of forty steps over static and dynamic tables of two widths."""
    tables = [hb.Table("a", 8), hb.Table("b", 8, rows=500), hb.Table("c", 4, dtype=torch.bfloat16)]
    embeddings = hb.EmbeddingCollection(tables, seed=0, storage=storage)
    stepper = getattr(hb.optim, optimizer)(embeddings.parameters(), lr=0.1, **options)
    generator = torch.Generator().manual_seed(1)

    def batch() -> dict[str, torch.Tensor]:
        return {
            "a": torch.randint(0, 5000, (64,), generator=generator),
            "b": torch.randint(0, 500, (64, 3), generator=generator),
            "c": torch.randint(-300, 400, (64,), generator=generator),
        }

    batches = [batch() for _ in range(40)]
    losses = []
    for inputs in hb.lookahead(batches, embeddings, horizon=8) if ahead else batches:
        loss = sum(vectors.square().sum() for vectors in embeddings(inputs).values())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses, {name: embeddings.rows(name) for name in "abc"}, embeddings.stats()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("device", [None, 200_000])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("Adagrad", {}), ("Adam", {"untouched": "exact"}), ("RowwiseAdagrad", {"fused": True})],
)
def test_the_same_bits_as_in_memory(
    tmp_path: Path, optimizer: str, options: dict[str, Any], device: int | None, ahead: bool
) -> None:
    losses, rows, _ = train(None, False, optimizer, **options)
    storage = hb.Storage(device=device, host="40MB", ssd=tmp_path / "rows")
    tiered_losses, tiered_rows, counted = train(storage, ahead, optimizer, **options)
    assert tiered_losses == losses
    for name in rows:
        assert torch.equal(tiered_rows[name].ids, rows[name].ids)
        assert torch.equal(tiered_rows[name].values, rows[name].values)
    assert counted["batches_unprepared"] == (0 if ahead else 40)
    if device is not None:
        assert counted["rows_written_back"] > 1000
    assert counted["rows_to_ssd"] == counted["rows_from_ssd"] == 0  # there is room in RAM


def test_a_folder_serves_one_collection_and_one_run(tmp_path: Path) -> None:
    storage = hb.Storage(host="40MB", ssd=tmp_path)
    first = hb.EmbeddingCollection([hb.Table("a", 4)], storage=storage)
    first.assign("a", torch.tensor([1]), torch.ones(1, 4))
    with pytest.raises(hb.StorageError, match="in use by this process"):
        hb.EmbeddingCollection([hb.Table("a", 4)], storage=storage)
    del first
    gc.collect()
    with pytest.raises(hb.StorageError, match="reset=True"):
        hb.EmbeddingCollection([hb.Table("a", 4)], storage=storage)
    fresh = hb.Storage(host="40MB", ssd=tmp_path, reset=True)
    again = hb.EmbeddingCollection([hb.Table("a", 4)], storage=fresh)
    assert again.count() == 0


def test_inspect_shows_what_a_run_has_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embeddings = hb.EmbeddingCollection(
        [hb.Table("user", 4), hb.Table("item", 4, rows=1000)],
        storage=hb.Storage(host="40MB", ssd=tmp_path),
    )
    embeddings.assign("user", torch.arange(70), torch.ones(70, 4))
    embeddings.assign("item", torch.arange(30), torch.ones(30, 4))
    embeddings.flush()
    with pytest.raises(hb.StorageError, match="use"):
        contents(tmp_path)
    del embeddings
    gc.collect()
    (log,) = contents(tmp_path)
    assert {t["table"]: t["rows"] for t in log["tables"]} == {"user": 70, "item": 30}
    assert log["dropped_blocks"] == [] and log["live_bytes"] <= log["bytes"]
    inspect(str(tmp_path), None)
    shown = capsys.readouterr().out
    assert "user" in shown and "0 .. 999" in shown
    with pytest.raises(hb.StorageError, match="not a folder"):
        contents(tmp_path / "nothing")


def test_inspect_shows_the_hottest_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rows"
    embeddings = hb.EmbeddingCollection(
        [hb.Table("user", 4), hb.Table("item", 4, rows=1000), hb.Table("idle", 4, rows=9)],
        features={"user": "user", "item": "item"},
        storage=hb.Storage(host="40MB", ssd=folder),
    )
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1)
    for at in range(24):
        users = torch.tensor([10**12, 5 if at % 3 == 0 else 6, at + 100])
        vectors = embeddings({"user": users, "item": torch.tensor([7, 7, at % 2])})
        sum(v.sum() for v in vectors.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    embeddings.eval()
    embeddings({"user": torch.tensor([100]), "item": torch.tensor([999])})
    hottest = embeddings.hottest("user", 3)
    assert hottest == [(10**12, 24, 0), (6, 16, 0), (5, 8, 0)]
    assert embeddings.hottest("item") == [(7, 48, 0), (0, 12, 0), (1, 12, 0)]
    assert embeddings.hottest("idle") == [] and embeddings.hottest("user", 0) == []
    with pytest.raises(hb.TableError, match="no table 'nobody'"):
        embeddings.hottest("nobody")
    embeddings.flush()
    del embeddings, optimizer, vectors
    gc.collect()
    inspect(str(folder), str(tmp_path / "found.json"))
    shown = capsys.readouterr().out
    assert ", ".join(f"{row} ({uses})" for row, uses, _ in hottest) in " ".join(shown.split())
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["hottest"]["item"][0][0] == 7 and found["hottest"]["idle"] == []
    (folder / "hottest.json").write_text('{"user": [1]}')
    with pytest.raises(typer.Exit):
        inspect(str(folder), None)
    assert "hottest.json cannot be read" in capsys.readouterr().err
    fresh = hb.Storage(host="40MB", ssd=folder, reset=True)
    hb.EmbeddingCollection([hb.Table("a", 4)], storage=fresh)
    assert not (folder / "hottest.json").exists()


def test_hottest_ids_that_cannot_be_noted(tmp_path: Path) -> None:
    embeddings = hb.EmbeddingCollection(
        [hb.Table("a", 4)], storage=hb.Storage(host="40MB", ssd=tmp_path)
    )
    (tmp_path / "hottest.json").mkdir()
    with pytest.raises(hb.StorageError, match=r"hottest\.json.* cannot be written"):
        embeddings.flush()


def test_an_optimizer_that_comes_later_keeps_the_rows(tmp_path: Path) -> None:
    embeddings = hb.EmbeddingCollection(
        [hb.Table("a", 4), hb.Table("b", 4, rows=10)],
        storage=hb.Storage(host="40MB", ssd=tmp_path),
    )
    ids, values = torch.arange(100), torch.randn(100, 4)
    embeddings.assign("a", ids, values)
    hb.optim.Adam(embeddings.parameters())
    assert torch.equal(embeddings.rows("a").values, values)
    assert [path.name for path in tmp_path.glob("rows-*")] == ["rows-2"]


@pytest.mark.parametrize("device", [None, 2_000_000])
def test_an_index_that_grows_stays_within_the_budget(tmp_path: Path, device: int | None) -> None:
    """Every new id makes the log's index larger, and slots give way to it."""
    budget = 24_000_000
    collections = [
        hb.EmbeddingCollection([hb.Table("user", 16)], seed=0, storage=storage)
        for storage in (None, hb.Storage(device=device, host=budget, ssd=tmp_path))
    ]
    optimizers = [hb.optim.Adagrad(c.parameters(), lr=0.1) for c in collections]
    generator = torch.Generator().manual_seed(0)
    memory = []
    for at in range(60):
        users = torch.randint(0, 10**12, (6000,), generator=generator)
        users[:2000] = torch.randint(0, 50_000, (2000,), generator=generator)
        for collection, optimizer in zip(collections, optimizers, strict=True):
            collection({"user": users})["user"].cos().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if at % 10 == 9:
            memory.append(collections[1].stats()["memory_bytes"])
    stats = collections[1].stats()
    assert stats["rows_from_ssd"] > 10_000
    if device is None:  # else RAM answers for some
        assert stats["rows_from_ssd"] == stats["rows_missed"] - stats["rows_created"]
        assert stats["rows_to_ssd"] == stats["rows_written_back"]
    plain, tiered = (collection.rows("user") for collection in collections)
    assert len(plain.ids) > 250_000 and torch.equal(plain.ids, tiered.ids)
    assert torch.equal(plain.values, tiered.values)
    # 130,000 more ids take 2.9 MB of index.
    assert memory[-1] - memory[2] < 1_000_000
    # Beyond the budgets: 2 MiB for the transfers of each thread, and rounding to 2 MiB.
    assert max(memory) < budget + (device or 0) + (8 << 20)
