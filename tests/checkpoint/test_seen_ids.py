"""Ids that were seen, against Python's sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.checkpoint.chain import chain_of
from hotbed.checkpoint.chain_rows import ids_of_chain
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.seen_ids import seen_ids

ROWS = 40
IDS = st.lists(st.integers(-3, ROWS + 3), max_size=30)


@given(st.lists(st.tuples(IDS, IDS), max_size=6), st.sampled_from([ROWS, None, 1 << 40]))
def test_they_are_those_that_were_added(
    turns: list[tuple[list[int], list[int]]], rows: int | None
) -> None:
    seen, expected = seen_ids(rows), set[int]()
    for added, asked in turns:
        found = seen.are_new(torch.tensor(asked, dtype=torch.int64))
        assert found.tolist() == [one not in expected for one in asked]
        seen.add(torch.tensor(added, dtype=torch.int64))
        # Ids that no table of so many rows has are refused elsewhere.
        expected |= {one for one in added if rows != ROWS or 0 <= one < ROWS}


@pytest.mark.parametrize("rows", [1 << 27, None])
def test_large_ids(rows: int | None) -> None:
    seen = seen_ids(rows)
    seen.add(torch.tensor([(1 << 27) - 1, 5]))
    assert seen.are_new(torch.tensor([5, 6, (1 << 27) - 1])).tolist() == [False, True, False]


def test_of_a_chain_each_id_comes_once(tmp_path: Path) -> None:
    tables = hb.EmbeddingCollection([hb.Table("static", 2, 30), hb.Table("dynamic", 2)], seed=0)
    for step in range(3):
        for name in tables.tables:
            tables.assign(
                name,
                range(step, 20, step + 1),
                torch.full((len(range(step, 20, step + 1)), 2), 1.0),
            )
        last = hb.save(tmp_path, tables, step=step, delta=True).path
    assert hb.checkpoint.list(tmp_path)[-1].step == 2
    for name in tables.tables:
        links = chain_of(last, read_manifest(last))
        ids = torch.cat([*ids_of_chain(links, name)]).tolist()
        assert sorted(ids) == [*range(tables.tables[name].rows or 20)] and len(links) == 3


def test_merging_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait to be written stay as they are while later files are read into the same memory."""
    made = [hb.Table(f"t{n:02}", 8, 200) for n in range(40)]
    tables = hb.EmbeddingCollection(made, seed=0)
    hb.save(tmp_path / "run", tables, step=0)
    for name in tables.tables:
        tables.assign(name, range(150), torch.randn(150, 8))
    monkeypatch.setattr("hotbed.checkpoint.rows.FILE_BYTES", 6000)
    last = hb.save(tmp_path / "run", tables, step=1, delta=True).path
    assert len([*Path(last).glob("rows-*")]) > 20
    monkeypatch.setattr("hotbed.checkpoint.rows.FILE_BYTES", 100_000)
    merged = hb.checkpoint.merge(last, tmp_path / "merged")
    other = hb.EmbeddingCollection(made, seed=1)
    hb.load(merged, other)
    for name in tables.tables:
        assert torch.equal(other.rows(name).values, tables.rows(name).values)
