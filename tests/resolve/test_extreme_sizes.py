"""Tables of which a product of sizes is beyond counting, and rows as wide as may be."""

from pathlib import Path

import pytest
import torch

import hotbed as hb
from hotbed.storage import MOST_BYTES
from hotbed.tables import MAX_DIM

MOST_ROWS = 2**63 - 1


def trained(
    embeddings: hb.EmbeddingCollection, ids: list[int], rule: type[torch.optim.Optimizer]
) -> torch.Tensor:
    """Rows after a step with a gradient of ones for each."""
    optimizer = rule(embeddings.parameters(), lr=0.5)  # type: ignore[call-arg]
    optimizer.zero_grad()
    outputs = embeddings({name: torch.tensor([ids]) for name in embeddings.tables})
    torch.cat(list(outputs.values()), dim=1).sum().backward()
    optimizer.step()
    return embeddings.lookup(next(iter(embeddings.tables)), torch.tensor(ids))


@pytest.mark.parametrize("rows", [2**31, 2**32, 2**60, 2**61, 2**62, MOST_ROWS])
@pytest.mark.parametrize("tables", [1, 2, 4])
@pytest.mark.parametrize("device", [None, "20MB"])
def test_an_index_on_ssd_beyond_the_budget_is_refused(
    tmp_path: Path, rows: int, tables: int, device: str | None
) -> None:
    """Four tables of 2**62 rows, at four bytes each, are 0 modulo 2**64."""
    storage = hb.Storage(device=device, host="40MB", ssd=tmp_path / "log")
    described = [hb.Table(f"t{k}", dim=4, rows=rows) for k in range(tables)]
    said = rf"'t0' has rows={rows:,}\. Raise Storage\(host=40,000,000\) to at least "
    said += rf"{4 * tables * rows:,} bytes, or pass rows=None"
    with pytest.raises(hb.StorageError, match=said):
        hb.EmbeddingCollection(described, storage=storage)
    assert not (tmp_path / "log").exists()


def test_an_index_that_the_machine_cannot_hold_is_refused(tmp_path: Path) -> None:
    for rows in (MOST_BYTES // 4, MOST_BYTES // 8):
        embeddings = hb.EmbeddingCollection(
            [hb.Table("a", dim=4, rows=rows)],
            storage=hb.Storage(host=MOST_BYTES, ssd=tmp_path / str(rows)),
        )
        with pytest.raises(hb.OutOfMemory, match=f"index of {rows} rows on SSD"):
            embeddings({"a": torch.tensor([[1]])})


@pytest.mark.parametrize("dim", [1, MAX_DIM])
@pytest.mark.parametrize("rows", [2**41, 2**62, MOST_ROWS])
def test_any_number_of_rows_that_lie_nowhere_yet(rows: int, dim: int) -> None:
    tables = [hb.Table("a", dim=dim, rows=rows), hb.Table("b", dim=dim, rows=rows)]
    storage = hb.Storage(device="400MB", host="400MB")
    embeddings = hb.EmbeddingCollection(tables, seed=3, storage=storage)
    ids = [0, rows - 1]
    first = embeddings.lookup("a", torch.tensor(ids))
    assert torch.equal(trained(embeddings, ids, hb.optim.SGD), first - 0.5)
    assert embeddings.count() == 2 * rows


@pytest.mark.parametrize("rows", [2**41, 2**61, MOST_ROWS])
def test_rows_that_lie_in_memory_must_fit_there(rows: int) -> None:
    for dim in (1, MAX_DIM):
        with pytest.raises(hb.OutOfMemory, match="Table 'a', weights"):
            hb.EmbeddingCollection([hb.Table("a", dim=dim, rows=rows)])
        with pytest.raises(hb.StorageError, match="weights alone take"):
            hb.EmbeddingCollection([hb.Table("a", dim, rows)], storage=hb.Storage(host="4GB"))


@pytest.mark.parametrize("device", [None, "300MB"])
@pytest.mark.parametrize("dim", [MAX_DIM // 16, MAX_DIM // 16 - 3, 200_000])
def test_the_widest_rows_that_an_ssd_takes(tmp_path: Path, dim: int, device: str | None) -> None:
    """262,144 numbers of 4 bytes are 1 MiB."""
    host = "30MB" if device else "300MB"
    storage = hb.Storage(device=device, host=host, ssd=tmp_path)
    embeddings = hb.EmbeddingCollection([hb.Table("a", dim=dim)], seed=1, storage=storage)
    ids = list(range(0, 4000, 100))
    first = embeddings.lookup("a", torch.tensor(ids))
    for some in (ids[:20], ids[20:]):
        assert torch.equal(
            trained(embeddings, some, hb.optim.SGD), first[[ids.index(i) for i in some]] - 0.5
        )
    embeddings.flush()
    assert embeddings.stats()["rows_to_ssd"] > 0
    assert torch.equal(embeddings.lookup("a", torch.tensor(ids)), first - 0.5)


def test_wider_rows_are_refused(tmp_path: Path) -> None:
    storage = hb.Storage(host="300MB", ssd=tmp_path / "log")
    with pytest.raises(hb.StorageError, match=r"'wide': a row of dim 262145 takes 1,048,580 bytes"):
        hb.EmbeddingCollection([hb.Table("a", 4), hb.Table("wide", 262145)], storage=storage)
    assert not (tmp_path / "log").exists()


def test_rows_that_are_too_wide_with_their_states(tmp_path: Path) -> None:
    storage = hb.Storage(host="300MB", ssd=tmp_path)
    embeddings = hb.EmbeddingCollection([hb.Table("wide", 131072)], seed=1, storage=storage)
    embeddings.assign("wide", torch.tensor([5]), torch.ones(1, 131072))
    hb.optim.Adam(embeddings.parameters())
    for _ in range(2):
        with pytest.raises(
            hb.StorageError, match="'wide'.*1572864 bytes with its optimizer states"
        ):
            embeddings({"wide": torch.tensor([[5]])})
    hb.optim.SGD(embeddings.parameters(), replace_state=True)
    assert embeddings.lookup("wide", torch.tensor([5])).sum() == 131072


def test_wide_rows_are_written_back_few_at_a_time() -> None:
    """8,192 of them at once would be 67 GB."""
    storage = hb.Storage(device="200MB", host="200MB")
    table = hb.Table("a", dim=MAX_DIM // 2, rows=1000)
    embeddings = hb.EmbeddingCollection([table], seed=1, storage=storage)
    rows = trained(embeddings, [1, 2, 999], hb.optim.SGD)
    embeddings.flush()
    assert torch.equal(embeddings.lookup("a", torch.tensor([1, 2, 999])), rows)


@pytest.mark.parametrize("tables", [256, 257])
def test_rows_of_many_sizes_in_one_folder(tmp_path: Path, tables: int) -> None:
    described = [hb.Table(f"t{dim}", dim=dim) for dim in range(1, tables + 1)]
    storage = hb.Storage(host="100MB", ssd=tmp_path / "log")
    if tables > 256:
        with pytest.raises(hb.StorageError, match="257 different pairs of dim and dtype"):
            hb.EmbeddingCollection(described, storage=storage)
        assert not (tmp_path / "log").exists()
        return
    embeddings = hb.EmbeddingCollection(described, storage=storage)
    assert len(embeddings({t.name: torch.tensor([[7]]) for t in described})) == tables


def test_rows_of_more_sizes_once_there_are_states(tmp_path: Path) -> None:
    described = [hb.Table(f"t{dim}", dim=dim) for dim in range(1, 201)]
    embeddings = hb.EmbeddingCollection(
        [*described, *(hb.Table(f"u{t.dim}", dim=t.dim) for t in described)],
        storage=hb.Storage(host="100MB", ssd=tmp_path),
    )
    handles = {name: embeddings.parameter(name) for name in embeddings.tables}
    kept = [hb.optim.Adagrad([p for n, p in handles.items() if n.startswith("u")])]
    with pytest.raises(hb.StorageError, match="400 kinds of them"):
        embeddings.lookup("t1", torch.tensor([1]))
    del kept


@pytest.mark.parametrize("name", ["host", "device"])
def test_budgets_beyond_the_machine_s_memory(name: str) -> None:
    storage = hb.Storage(device="4MB" if name == "host" else MOST_BYTES, host=MOST_BYTES)
    embeddings = hb.EmbeddingCollection([hb.Table("a", 4)], storage=storage)
    with pytest.raises(hb.OutOfMemory, match="Give Storage smaller budgets"):
        embeddings({"a": torch.tensor([[1]])})
