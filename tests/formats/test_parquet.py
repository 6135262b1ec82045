"""Parquet files, which pyarrow writes and reads here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats.format_tables import a_checkpoint, about, imported, refused, run, same

from hotbed.formats import FormatError, Hints
from hotbed.formats.kinds.parquet import Parquet

pa = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="Parquet files need pyarrow")

ROWS = np.random.default_rng(0).normal(size=(6, 3))


def vectors(kind: str, number: Any = None, rows: np.ndarray = ROWS) -> Any:
    number = pa.float32() if number is None else number
    made = {"list": pa.list_(number), "large": pa.large_list(number), "fixed": pa.list_(number, 3)}
    numpy = {pa.float16(): "f2", pa.float32(): "f4", pa.float64(): "f8"}[number]
    return pa.array([*rows.astype(numpy)], made[kind])


def write(path: Path, row_group: int | None = None, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group)
    return path


@pytest.mark.parametrize("number", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["list", "large", "fixed"])
def test_lists_of_any_kind(tmp_path: Path, kind: str, number: str) -> None:
    ids = pa.array([5, -1, 2**62, 0, 7, 8])
    column = vectors(kind, getattr(pa, number)())
    write(tmp_path / "user.parquet", 2, id=ids, vector=column, name=pa.array(["x"] * 6))
    found = imported(tmp_path / "user.parquet", tmp_path / "run")
    rows = torch.from_numpy(ROWS.astype(number))
    order = np.argsort(ids.to_numpy())
    same(found, {"user": (torch.from_numpy(ids.to_numpy()[order]), rows[order])})
    assert about(tmp_path / "run")["user"]["rows"] is None


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_ids_of_any_integers(tmp_path: Path, name: str) -> None:
    most = np.iinfo(name).max
    ids = np.array([most, 0, 3, 4, 5, 6], name)
    columns = {"user.key": pa.array(ids), "user.embedding": vectors("list")}
    path = write(tmp_path / "t.parquet", **columns)
    found = imported(path, tmp_path / "run")["t"][0]
    assert found.tolist() == np.sort(ids.astype(np.int64)).tolist()


def test_a_table_of_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.formats.tables.FILE_BYTES", 100)
    folder = tmp_path / "out" / "user.parquet"
    folder.parent.mkdir()
    for part in range(3):
        at = slice(2 * part, 2 * part + 2)
        column = vectors("list", rows=ROWS[at])
        write(folder / f"part-{part}.parquet", id=pa.array(range(6)[at]), vector=column)
    (folder / "_SUCCESS").touch()
    expected = {"user": (torch.arange(6), torch.from_numpy(ROWS.astype("f4")))}
    same(imported(folder, tmp_path / "run"), expected)
    write(tmp_path / "out" / "item.parquet", id=pa.array(range(6)), vector=vectors("fixed"))
    expected["item"] = expected["user"]
    same(imported(tmp_path / "out", tmp_path / "both"), expected)
    write(folder / "part-3.parquet", id=pa.array([5, 6]), vector=vectors("list", rows=ROWS[:2]))
    assert "has the id 5 twice" in refused("import", folder, "--to", tmp_path / "no")
    ids = pa.array([7, 8], pa.int32())
    write(folder / "part-3.parquet", id=ids, vector=vectors("list", rows=ROWS[:2]))
    assert "parts whose columns differ" in refused("import", folder, "--to", tmp_path / "no")
    (folder / "part-3.parquet").write_bytes(b"PAR1")
    assert "cannot be read as Parquet" in refused("import", folder, "--to", tmp_path / "no")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_there_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = a_checkpoint(tmp_path / "run", dtype)
    assert run("dump", tmp_path / "run", "--to", tmp_path / "out", "--format", "parquet")[0] == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["item.weight.parquet", "user.parquet"]
    if dtype == torch.bfloat16:
        expected = {name: (ids, weights.float()) for name, (ids, weights) in expected.items()}
    read = pq.read_table(tmp_path / "out" / "user.parquet").sort_by("id").to_pydict()
    assert read["id"] == expected["user"][0].tolist()
    assert torch.equal(
        torch.tensor(np.array(read["vector"])).double(), expected["user"][1].double()
    )
    same(imported(tmp_path / "out", tmp_path / "back"), expected)
    assert about(tmp_path / "back")["item.weight"]["rows"] == 10
    assert about(tmp_path / "back")["user"]["rows"] is None


def test_a_file_is_of_one_table(tmp_path: Path) -> None:
    expected = a_checkpoint(tmp_path / "run")
    to = ("--to", tmp_path / "u.parquet")
    assert "file of one table, and there are 2" in refused("dump", tmp_path / "run", *to)
    assert not (tmp_path / "u.parquet").exists()
    assert run("dump", tmp_path / "run", *to, "--table", "user")[0] == 0
    same(imported(tmp_path / "u.parquet", tmp_path / "back"), {"user": expected["user"]})


def test_a_dynamic_table_without_rows(tmp_path: Path) -> None:
    from hotbed.checkpoint import write as write_checkpoint

    write_checkpoint(tmp_path / "run", {"t": [(torch.arange(0), torch.empty(0, 3).half())]})
    for format_ in ("parquet", "npy", "safetensors", "torch"):
        to = tmp_path / format_
        assert run("dump", tmp_path / "run", "--to", to, "--format", format_)[0] == 0
        found = imported(to, tmp_path / f"{format_}.run", "--format", format_)
        assert found["t"][1].shape == (0, 3) and found["t"][1].dtype == torch.float16


IDS = pa.array(range(6))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"id": IDS}, "needs one column of lists of floats"),
        ({"vector": vectors("list")}, "needs one column of integers"),
        (
            {"a": IDS, "b": IDS, "vector": vectors("list")},
            "or one that is named 'id'; it has the columns a",
        ),
        ({"id": IDS.cast("string"), "vector": vectors("list")}, "id (string)"),
        ({"id": IDS, "vector": pa.array([[1, 2]] * 6)}, "vector (list<"),
        ({"id": pa.array([None, *range(5)]), "vector": vectors("list")}, "rows without an id"),
        ({"id": pa.array([3, *range(5)]), "vector": vectors("list")}, "has the id 3 twice"),
        ({"id": IDS, "vector": pa.array([[1.0, 2.0]] * 5 + [None])}, "vectors that lack numbers"),
        (
            {"id": IDS, "vector": pa.array([[1.0, 2.0]] * 5 + [[1.0, None]])},
            "vectors that lack numbers",
        ),
        ({"id": IDS, "vector": pa.array([[1.0, 2.0]] * 5 + [[1.0]])}, "not all are of 2"),
        ({"id": IDS, "vector": pa.array([[]] * 6, pa.list_(pa.float32()))}, "vectors of 0 numbers"),
        ({"id": IDS[:0], "vector": vectors("list")[:0]}, "vectors of 0 numbers"),
    ],
)
def test_columns_that_are_none(tmp_path: Path, columns: dict[str, Any], why: str) -> None:
    path = write(tmp_path / "t.parquet", **columns)
    said = refused("import", path, "--to", tmp_path / "run")
    assert "t.parquet" in said and why in said
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_named_columns_win(tmp_path: Path) -> None:
    other = vectors("list", rows=ROWS * 2)
    path = write(tmp_path / "t.parquet", a=IDS, b=other, id=IDS, vector=vectors("list"))
    expected = torch.from_numpy(ROWS.astype("f4"))
    same(imported(path, tmp_path / "run"), {"t": (torch.arange(6), expected)})


def test_not_a_number_is_a_number(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[0, 0], rows[1, 1] = np.nan, np.inf
    path = write(tmp_path / "t.parquet", id=IDS, vector=vectors("fixed", rows=rows))
    same(
        imported(path, tmp_path / "r"),
        {"t": (torch.arange(6), torch.from_numpy(rows.astype("f4")))},
    )


@pytest.mark.parametrize("kind", ["garbage", "cut", "page"])
def test_files_that_are_none(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "t.parquet", id=IDS, vector=vectors("list"))
    raw = bytearray(path.read_bytes())
    raw[4:40] = b"\xff" * 36
    files = {"garbage": b"garbage" * 9, "cut": path.read_bytes()[:-9], "page": raw}
    path.write_bytes(files[kind])
    said = refused("import", path, "--to", tmp_path / "run")
    assert "t.parquet cannot be read as Parquet" in said
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_checkpoint(tmp_path / "run")
    path = write(tmp_path / "t.parquet", id=IDS, vector=vectors("list"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install hotbed[arrow]" in refused("import", path, "--to", tmp_path / "no")
    options = ("--to", tmp_path / "out", "--format", "parquet")
    assert "pip install hotbed[arrow]" in refused("dump", tmp_path / "run", *options)


def test_every_byte_of_a_dump_is_checked(tmp_path: Path) -> None:
    a_checkpoint(tmp_path / "run")
    path = tmp_path / "user.parquet"
    assert run("dump", tmp_path / "run", "--to", path, "--table", "user")[0] == 0
    whole = path.read_bytes()
    for at in range(len(whole)):
        raw = bytearray(whole)
        raw[at] ^= 1
        path.write_bytes(raw)
        with pytest.raises(FormatError, match=r"user\.parquet (is damaged|cannot be read)"):
            Parquet().read(str(path), Hints())


def test_pages_of_others_are_checked(tmp_path: Path) -> None:
    columns = {"id": IDS, "vector": vectors("fixed")}
    path = tmp_path / "t.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table(columns), path, **options)
    raw = bytearray(path.read_bytes())
    at = raw.index(ROWS.astype("f4").tobytes())
    raw[at + 5] ^= 1
    path.write_bytes(raw)
    said = refused("import", path, "--to", tmp_path / "run")
    assert "t.parquet cannot be read as Parquet" in said and "CRC" in said


def test_a_dump_that_somebody_has_changed_is_theirs(tmp_path: Path) -> None:
    expected = a_checkpoint(tmp_path / "run")["user"]
    path = tmp_path / "user.parquet"
    assert run("dump", tmp_path / "run", "--to", path, "--table", "user")[0] == 0
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 3), path)
    ids, rows = imported(path, tmp_path / "back")["user"]
    assert len(ids) == 3
    at = torch.searchsorted(expected[0], ids)
    assert torch.equal(rows, expected[1][at])


@pytest.mark.parametrize("text", ["9" * 5_000, "9" * 15, "0", "-4", "4.0", ""])
def test_a_number_of_rows_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"id": IDS, "vector": vectors("list")})
    pq.write_table(table.replace_schema_metadata({"hotbed.rows": text}), path)
    said = refused("import", path, "--to", tmp_path / "run")
    assert "t.parquet: its entry hotbed.rows is" in said and "no number of rows" in said
    assert len(said) < 300
