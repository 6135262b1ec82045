"""What tables take of the machine's memory is what their rows take, and what `memory()` says."""

from __future__ import annotations

from pathlib import Path

import memory_of_tables
import pytest
import torch
from copies import in_a_copy
from memory_of_tables import BUDGET, DIM, ROWS

import hotbed as hb

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc"),
]

PAGE = 4096


def slack(tables: int) -> int:
    """Of Python and torch: the objects of a table, and what a batch leaves."""
    return 4_000_000 + 20_000 * tables


def stages(tables: int, kind: str, folder: Path) -> dict[str, tuple[int, int]]:
    """Stage → (bytes by which a fresh process has grown, bytes that the collection counts)."""
    found = in_a_copy(memory_of_tables.told_stages, tables, kind, str(folder))
    return {stage: (grown, counted) for stage, grown, counted in found}


@pytest.mark.process
@pytest.mark.parametrize("tables", [1, 10, 400, 2000])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_tables_take_what_they_count(tmp_path: Path, kind: str, tables: int) -> None:
    found = stages(tables, kind, tmp_path)
    for stage, (grown, counted) in found.items():
        assert abs(grown - counted) <= max(counted / 20, slack(tables)), stage
    counted = found["trained"][1]
    planes = 3 * DIM * 4 + (8 if kind == "dynamic" else 0)
    assert tables * ROWS * planes <= counted <= tables * (ROWS * (planes + 24) + 4 * PAGE)
    if kind == "dynamic":
        assert found["half erased"][1] < 0.7 * counted
        assert found["forgotten"][1] < 100 * tables


@pytest.mark.process
@pytest.mark.parametrize("tables", [1, 10, 400, 2000])
@pytest.mark.parametrize("kind", ["static ssd", "dynamic ssd"])
def test_tiers_take_what_they_count_within_their_budget(
    tmp_path: Path, kind: str, tables: int
) -> None:
    for stage, (grown, counted) in stages(tables, kind, tmp_path).items():
        assert counted <= BUDGET, stage
        assert abs(grown - counted) <= max(counted / 20, slack(tables)), stage


@pytest.mark.process
def test_what_large_batches_have_used_goes_with_the_tables() -> None:
    before, trained, gone = in_a_copy(memory_of_tables.around_large_batches)
    assert trained - before > 3 * slack(1)
    assert gone - before < slack(1)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["static host", "dynamic host"])
def test_counts_of_uses_count(tmp_path: Path, kind: str) -> None:
    """A budget without an SSD has the uses of each table's ids counted, in memory beside it."""
    tables = 700
    for stage, (grown, counted) in stages(tables, kind, tmp_path).items():
        assert abs(grown - counted) <= max(counted / 20, slack(tables)), stage


def test_the_budget_holds_in_whole_pages() -> None:
    """Rows that went leave their pages to other tables, and count until they do."""
    tables = [hb.Table(name, 100) for name in "ab"]
    embeddings = hb.EmbeddingCollection(tables, storage=hb.Storage(host=1_000_000))

    def taken() -> int:
        return sum(table["total"] for table in embeddings.memory().values())

    embeddings.assign("a", torch.arange(2000), torch.ones(2000, 100))
    full = taken()
    assert 2000 * 408 <= full <= 1_000_000
    embeddings.erase("a", torch.arange(1000, 1100))
    assert taken() == full
    with pytest.raises(hb.StorageError, match="Table 'b' needs"):
        embeddings.assign("b", torch.arange(400), torch.ones(400, 100))
    embeddings.erase("a", torch.arange(1100, 1500))
    assert taken() < full - 400 * 400
    embeddings.assign("b", torch.arange(400), torch.ones(400, 100))
    assert taken() <= 1_000_000
    assert bool((embeddings.rows("a").values == 1).all())
    embeddings.table("a").forget_rows()
    assert embeddings.memory()["a"]["total"] < 100
    assert bool((embeddings.rows("b").values == 1).all())


def test_states_of_a_large_table_take_nothing_until_they_are_used() -> None:
    embeddings = hb.EmbeddingCollection([hb.Table("a", 128, 40_000)])
    weights = 40_000 * 512
    optimizer = hb.optim.Adam(embeddings.parameters())
    assert weights <= embeddings.memory()["a"]["total"] < weights + PAGE
    assert embeddings.memory()["a"]["states"] == 2 * weights
    embeddings({"a": torch.tensor([[1]])})["a"].sum().backward()
    optimizer.step()
    more = embeddings.memory()["a"]["total"] - weights
    assert 2 * PAGE <= more <= 2 * (2 << 20) + PAGE  # huge pages, where the machine has them


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("rows", [5, 10_000, 30_000])
def test_a_first_step_finds_the_pages_of_states(rows: int, untouched: str) -> None:
    """Else it would wait for all of them, wherever its ids lie."""
    embeddings = hb.EmbeddingCollection([hb.Table("a", 16, rows)])
    optimizer = hb.optim.Adam(embeddings.parameters(), untouched=untouched)
    before = embeddings.memory()["a"]
    assert before["total"] >= before["weights"] + before["states"]
    embeddings({"a": torch.randperm(rows)})["a"].sum().backward()
    optimizer.step()
    assert embeddings.memory()["a"] == before


@pytest.mark.parametrize("rows", [30_000, 100_000])
def test_rows_are_kept_when_planes_become_large(rows: int) -> None:
    """Grown by steps on both sides of a huge page and two."""
    embeddings = hb.EmbeddingCollection([hb.Table("a", 16)])
    values = torch.randn(rows, 16)
    for ids in torch.arange(rows).split(7777):
        embeddings.assign("a", ids * 31, values[ids])
    assert torch.equal(embeddings.lookup("a", torch.arange(rows) * 31), values)
    found = embeddings.memory()["a"]
    parts = found["weights"] + found["states"] + found["index"]
    assert parts <= found["total"] <= parts + 2 * (2 << 20)
