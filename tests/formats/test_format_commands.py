"""`hotbed import` and `hotbed dump` themselves: paths, formats, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from formats.format_tables import a_checkpoint, about, imported, refused, run, same, tables_in

import hotbed as hb
from hotbed.formats import WRITERS


def test_the_help_teaches_by_examples() -> None:
    code, said = run("import", "--help")
    assert code == 0 and "hotbed import model.pt --to runs/imported" in said
    assert "hotbed[arrow]" in said and "--rename" in said
    code, said = run("dump", "--help")
    assert code == 0 and "hotbed dump runs/1 --to tables.safetensors" in said


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    a_checkpoint(tmp_path / "run")
    return tmp_path / "run"


def test_nothing_is_overwritten(tables: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.pt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.pt").symlink_to("nothing")
    for to in ("mine.pt", "folder", "link.pt"):
        options = ("--to", tmp_path / to, "--format", "torch")
        assert f"{to} is there already. Name another." in refused("dump", tables, *options)
    assert (tmp_path / "mine.pt").read_text() == "mine"
    torch.save({"e.weight": torch.ones(2, 2)}, tmp_path / "a.pt")
    assert "--to is empty. Name a new file or folder." in refused("dump", tables, "--to", "")
    assert "run is there already. Name a new folder." in refused(
        "import", tmp_path / "a.pt", "--to", tables
    )
    assert "a.pt is there already" in refused(
        "import", tmp_path / "a.pt", "--to", tmp_path / "a.pt"
    )
    assert [*about(tables)] == ["item.weight", "user"]
    assert [*imported(tmp_path / "a.pt", tmp_path / "folder")] == ["e.weight"]  # which was empty


def test_a_dump_does_not_go_among_checkpoints(tables: Path) -> None:
    (step,) = tables.iterdir()
    for to in (step / "rows-0-9.safetensors", tables / "step-000000000009"):
        options = ("--to", to, "--format", "safetensors")
        assert "Name another." in refused("dump", tables, *options)


def test_formats_are_told(tables: Path, tmp_path: Path) -> None:
    formats = "npy, parquet, safetensors, sok, torch"
    said = refused("dump", tables, "--to", tmp_path / "out")
    assert f"out does not tell its format. Say --format: {formats}." in said
    said = refused("dump", tables, "--to", tmp_path / "out", "--format", "onnx")
    assert f"There is no format 'onnx'. There are {formats}." in said
    to = ("--to", tmp_path / "new")
    assert "nothing: No such file" in refused("import", tmp_path / "nothing", *to)
    (tmp_path / "a.txt").write_text("x")
    assert "does not tell its format" in refused("import", tmp_path / "a.txt", *to)
    assert "does not tell its format" in refused("import", tables, *to)
    (tmp_path / "mixed").mkdir()
    for name in ("a.npy", "b-key", "b-weight"):
        (tmp_path / "mixed" / name).touch()
    assert "looks like npy and sok" in refused("import", tmp_path / "mixed", *to)
    for wrong in ("torch", "safetensors"):
        options = (*to, "--format", wrong)
        assert "mixed is no plain file" in refused("import", tmp_path / "mixed", *options)
    assert "Not a directory" in refused("import", tmp_path / "a.txt", *to, "--format", "sok")
    np.save(tmp_path / "t.npy", np.ones((2, 2)))
    assert "--dim is not for this format" in refused("import", tmp_path / "t.npy", *to, "--dim", 2)


def test_a_folder_that_is_not_there(tables: Path, tmp_path: Path) -> None:
    to = tmp_path / "no" / "a.safetensors"
    assert "No such file or directory" in refused("dump", tables, "--to", to)
    assert "No such file" in refused("dump", tables, "--to", to.parent / "x", "--format", "npy")
    assert "There is no folder" in refused("dump", tmp_path / "x", "--to", tmp_path / "a.pt")


@pytest.mark.parametrize("format_", [*WRITERS])
def test_chosen_and_renamed(tables: Path, tmp_path: Path, format_: str) -> None:
    expected = tables_in(tables)["user"]
    options = ("--format", format_, "--table", "user", "--rename", "user=people")
    assert run("dump", tables, "--to", tmp_path / "out", *options)[0] == 0
    same(imported(tmp_path / "out", tmp_path / "r", "--format", format_), {"people": expected})


def test_tables_that_are_not_there(tables: Path, tmp_path: Path) -> None:
    to = ("--to", tmp_path / "a.pt")
    assert "has no table 'x'. It has item.weight, user." in refused(
        "dump", tables, *to, "--table", "x"
    )
    assert "has no table 'x'" in refused("dump", tables, *to, "--rename", "x=y")
    twice = ("--rename", "user=a", "--rename", "user=b")
    assert "--rename gives 'user' two names, 'a' and 'b'" in refused("dump", tables, *to, *twice)
    said = refused("dump", tables, *to, "--rename", "user=item.weight.ids")
    assert said == "Error: Table 'item.weight.ids' is named as a part of table 'item.weight'" + (
        " in a state_dict; rename one."
    )
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("format_", [*WRITERS])
def test_rows_that_were_never_touched(tmp_path: Path, format_: str) -> None:
    ids, rows = torch.tensor([5, 2]), torch.randn(2, 3)
    hb.checkpoint.write(tmp_path / "run", {"t": [(ids, rows)]}, rows={"t": 9})
    options = ("--to", tmp_path / "out", "--format", format_)
    if format_ == "parquet":
        assert run("dump", tmp_path / "run", *options)[0] == 0
        found = imported(tmp_path / "out", tmp_path / "back")
        same(found, {"t": (ids.flip(0), rows.flip(0))})
        assert about(tmp_path / "back")["t"]["rows"] == 9
        return
    said = refused("dump", tmp_path / "run", *options)
    assert "Table 't' lacks 7 of its 9 rows" in said and "--format parquet" in said
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("format_", ["torch", "safetensors", "npy", "sok"])
def test_a_row_that_is_there_twice(
    tmp_path: Path, format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.checkpoint.single.repeated", lambda ids: None)
    rows = torch.randn(3, 3)
    hb.checkpoint.write(tmp_path / "run", {"t": [(torch.tensor([0, 1, 1]), rows)]}, rows={"t": 3})
    options = ("--to", tmp_path / "out", "--format", format_)
    assert "lacks 1 of its 3 rows" in refused("dump", tmp_path / "run", *options)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("format_", [*WRITERS])
def test_a_damaged_checkpoint_leaves_nothing(tables: Path, tmp_path: Path, format_: str) -> None:
    last = sorted(next(tables.iterdir()).glob("rows-*"))[-1]
    raw = bytearray(last.read_bytes())
    raw[-1] ^= 1
    last.write_bytes(raw)
    said = refused("dump", tables, "--to", tmp_path / "out", "--format", format_)
    assert "is damaged" in said
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_rows_that_are_behind_their_optimizer(tmp_path: Path) -> None:
    model = hb.EmbeddingBag(20, 4, mode="sum")
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1, untouched="exact")
    for step in range(4):
        loss = model(torch.tensor([[step, 7]])).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hb.save(tmp_path / "run", model, optimizer, step=4)
    said = refused("dump", tmp_path / "run", "--to", tmp_path / "a.pt")
    assert "'weight' has rows that are behind its optimizer. Load the checkpoint" in said
    again = hb.EmbeddingBag(20, 4, mode="sum")
    hb.load(tmp_path / "run", again)
    hb.save(tmp_path / "current", again, step=4)
    assert run("dump", tmp_path / "current", "--to", tmp_path / "a.pt")[0] == 0
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(state["weight"], model.state_dict()["weight"])


def test_states_stay_behind(tmp_path: Path) -> None:
    model = hb.EmbeddingBag(6, 4, mode="sum")
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    model(torch.arange(6).view(1, -1)).sum().backward()
    optimizer.step()
    hb.save(tmp_path / "run", model, optimizer, step=1)
    hb.save(tmp_path / "run", model, optimizer, step=2)
    assert run("dump", tmp_path / "run", "--to", tmp_path / "a.safetensors")[0] == 0
    found = imported(tmp_path / "a.safetensors", tmp_path / "back")
    same(found, {"weight": (torch.arange(6), model.weight.detach())})


def test_a_full_disk_leaves_nothing(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.posix_fallocate", full)
    for format_ in ("torch", "safetensors", "npy", "sok"):
        said = refused("dump", tables, "--to", tmp_path / "out", "--format", format_)
        assert "No space left on device" in said
        assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("format_", [*WRITERS])
def test_a_dump_is_on_the_disk_before_it_appears(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    fsync, synced, out = os.fsync, set(), tmp_path / "out"

    def sync(descriptor: int) -> None:
        assert not out.exists()
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    assert run("dump", tables, "--to", out, "--format", format_)[0] == 0
    files = [*out.iterdir()] if out.is_dir() else [out]
    assert {file.stat().st_ino for file in files} <= synced


@pytest.mark.parametrize("name", [".hidden", "ä" * 127])
@pytest.mark.parametrize("format_", ["npy", "parquet"])
def test_names_that_are_hidden_or_too_long(tmp_path: Path, name: str, format_: str) -> None:
    rows = torch.arange(2), torch.ones(2, 2)
    hb.checkpoint.write(tmp_path / "run", {name: [rows]}, rows={name: 2})
    options = ("--to", tmp_path / "out", "--format", format_)
    said = refused("dump", tmp_path / "run", *options)
    assert f"Table {name!r} cannot name a file. --rename OLD=NEW helps." in said
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_rows_that_are_none_of_their_table(tmp_path: Path) -> None:
    """A checkpoint whose checksums are right, by a program that is wrong."""
    from hotbed import _core

    rows = (torch.arange(4) - 1, torch.ones(4, 2))
    step = Path(hb.checkpoint.write(tmp_path / "run", {"t": [rows]}))
    manifest = step / "checkpoint.json"
    text = manifest.read_bytes().replace(b'"rows": null', b'"rows": 4')
    body = text[: text.rindex(b'  "crc32c"')]
    seal = b'  "crc32c": "%08x"\n}\n' % _core.crc32c(np.frombuffer(bytearray(body), np.uint8))
    manifest.write_bytes(body + seal)
    for format_ in WRITERS:
        said = refused("dump", tmp_path / "run", "--to", tmp_path / "out", "--format", format_)
        assert "'t' has rows that are none of it; hotbed checkpoint verify tells more" in said
        assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_names_with_brackets_are_shown(tmp_path: Path) -> None:
    torch.save({"[/x]": torch.ones(2, 2), "[red]e.weight": torch.ones(2, 2)}, tmp_path / "a.pt")
    code, said = run("import", tmp_path / "a.pt", "--to", tmp_path / "run")
    assert code == 0 and "[/x]" in said and "[red]e.weight" in said
    assert "[red]e.weight" in run("dump", tmp_path / "run", "--to", tmp_path / "b.pt")[1]


def test_many_tensors_that_are_left(tmp_path: Path) -> None:
    state = {f"{at}.bias": torch.ones(2) for at in range(30)}
    torch.save({**state, "e.weight": torch.ones(2, 2)}, tmp_path / "a.pt")
    code, said = run("import", tmp_path / "a.pt", "--to", tmp_path / "run")
    assert code == 0 and "and 10 more" in said


def test_a_static_table_that_is_smaller_than_the_ids(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "id": pa.array([3, 10]),
        "vector": pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "weight.parquet")
    imported(tmp_path / "weight.parquet", tmp_path / "run")
    model = hb.EmbeddingBag(10, 2, mode="sum")
    says = r"rows-0-0.safetensors: the id 10 of table 'weight' is outside \[0, 10\). Give"
    with pytest.raises(hb.checkpoint.CheckpointError, match=says):
        hb.load(tmp_path / "run", model, strict=False)
    claims = pa.table(columns).replace_schema_metadata({"hotbed.rows": "10"})
    pq.write_table(claims, tmp_path / "weight.parquet")
    said = refused("import", tmp_path / "weight.parquet", "--to", tmp_path / "no")
    assert "Table 'weight': the id 10 is outside [0, 10)" in said
