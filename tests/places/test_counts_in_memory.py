"""What is counted of tables whose rows all lie in memory."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

import hotbed as hb

IDS = [
    torch.tensor([[5, 5], [7, 3]]),
    torch.tensor([[5, 9], [-1, 5]]),
    torch.tensor([[7, 7], [7, 3]]),
]
"""-1: padding of the dynamic table."""


def made(storage: hb.Storage | None) -> hb.EmbeddingCollection:
    tables = [hb.Table("user", 4, padding_idx=-1), hb.Table("item", 4, rows=20)]
    return hb.EmbeddingCollection(tables, {"a": "user", "b": "item"}, seed=0, storage=storage)


def train(embeddings: hb.EmbeddingCollection) -> None:
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1)
    for ids in IDS:
        vectors = embeddings({"a": ids, "b": ids.clamp(min=0)})
        (vectors["a"].sum() + vectors["b"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    embeddings.eval()
    embeddings({"a": torch.tensor([[99, 98]]), "b": torch.tensor([[11, 12]])})
    embeddings.train()


@pytest.mark.parametrize("storage", [None, hb.Storage(host="1MB")])
def test_batches_and_rows_are_counted(storage: hb.Storage | None) -> None:
    embeddings = made(storage)
    assert embeddings.stats()["hit_rate"] == 1 and embeddings.stats()["batches"] == 0
    train(embeddings)
    stats = embeddings.stats()
    memory = stats.pop("memory_bytes")
    assert memory == sum(table["total"] for table in embeddings.memory().values()) > 0
    distinct = sum(len(i.unique()) - int((i < 0).any()) + len(i.clamp(min=0).unique()) for i in IDS)
    assert stats == {
        "rows_used": distinct,
        "rows_missed": 4,  # 3, 5, 7, 9 of the dynamic table
        "rows_created": 4,
        "hit_rate": (distinct - 4) / distinct,
        "batches": 3,
        "wait_ms": 0,
    }


def test_a_budget_counts_uses() -> None:
    embeddings = made(hb.Storage(host="1MB"))
    train(embeddings)
    true = Counter(i for ids in IDS for i in ids.flatten().tolist() if i >= 0)
    expected = sorted(true.items(), key=lambda one: (-one[1], one[0]))
    assert embeddings.hottest("user") == [(row, uses, 0) for row, uses in expected]
    assert embeddings.hottest("item", 2) == [(5, 4, 0), (7, 4, 0)]
    assert dict((i, n) for i, n, _ in embeddings.hottest("item"))[0] == 1  # where padding was
    embeddings.erase("user", [5])
    assert [used.id for used in embeddings.hottest("user")] == [7, 3, 9]
    embeddings.table("user").forget_rows()
    assert embeddings.hottest("user") == []
    assert copy.deepcopy(embeddings).hottest("item") == []


def test_a_batch_that_is_refused_counts_for_nothing() -> None:
    tables = [hb.Table("a", 4), hb.Table("b", 400)]
    embeddings = hb.EmbeddingCollection(tables, storage=hb.Storage(host="1MB"))
    with pytest.raises(hb.StorageError, match="Table 'b' needs"):
        embeddings({name: torch.arange(5000).view(-1, 1) for name in "ab"})
    assert embeddings.stats()["batches"] == embeddings.stats()["rows_used"] == 0
    assert embeddings.hottest("a") == []


def test_without_storage_uses_are_not_counted_and_that_is_said() -> None:
    embeddings = made(None)
    train(embeddings)
    with pytest.raises(hb.TableError, match=r"'user' counts no uses.*Storage\(host="):
        embeddings.hottest("user")


def test_bytes_of_a_table_in_memory() -> None:
    tables = [hb.Table("a", 4, 30), hb.Table("b", 6, dtype=torch.float16)]
    embeddings = hb.EmbeddingCollection(tables)
    hb.optim.Adam(embeddings.parameters())
    embeddings({"a": torch.arange(10), "b": torch.arange(10)})
    found = embeddings.memory()
    assert {k: v for k, v in found["a"].items() if k != "total"} == {
        "rows": 30, "weights": 30 * 16, "states": 2 * 30 * 16, "index": 0
    }  # fmt: skip
    b = found["b"]
    assert (b["rows"], b["weights"]) == (10, 10 * 12) and b["index"] > 0
    tiers = hb.EmbeddingCollection(tables, storage=hb.Storage(device="1MB", host="1MB"))
    tiers({"a": torch.arange(10), "b": torch.arange(10)})
    assert [table["index"] for table in tiers.memory().values()] == [0, 0]
    assert b["states"] == 10 * (2 * 6 * 4 + 8)  # with the ids
