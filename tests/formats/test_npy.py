"""Folders of .npy files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from formats.format_tables import a_checkpoint, about, imported, refused, run, same

FLOATS = ["float16", "float32", "float64"]


def saved(folder: Path, **arrays: object) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("ends", ["<", ">"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_arrays_of_any_order(tmp_path: Path, dtype: str, ends: str, order: str) -> None:
    rows = np.random.default_rng(0).normal(size=(11, 3)).astype(dtype)
    given = np.asarray(rows, np.dtype(dtype).newbyteorder(ends), order=order)
    folder = saved(tmp_path / "tables", table_0=given, table_1=rows[:2])
    found = imported(folder, tmp_path / "run")
    expected = {"table_0": torch.from_numpy(rows), "table_1": torch.from_numpy(rows[:2])}
    same(found, {name: (torch.arange(len(t)), t) for name, t in expected.items()})
    assert about(tmp_path / "run")["table_0"]["rows"] == 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_there_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = a_checkpoint(tmp_path / "run", dtype)
    assert run("dump", tmp_path / "run", "--to", tmp_path / "out", "--format", "npy")[0] == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["item.weight.npy", "user.ids.npy", "user.npy"]
    if dtype == torch.bfloat16:  # which NumPy has not
        expected = {name: (ids, weights.float()) for name, (ids, weights) in expected.items()}
    items = np.load(tmp_path / "out" / "item.weight.npy")
    assert items.tobytes() == expected["item.weight"][1].numpy().tobytes()
    same(imported(tmp_path / "out", tmp_path / "back"), expected)
    one = imported(tmp_path / "out" / "user.npy", tmp_path / "one")
    same(one, {"user": expected["user"]})


def test_what_is_left(tmp_path: Path) -> None:
    folder = saved(
        tmp_path / "t", a=np.ones((2, 2)), b=np.ones(3), c=np.ones((2, 2), int), d=np.ones((0, 4))
    )
    (folder / "note.txt").write_text("mine")
    code, said = run("import", folder, "--to", tmp_path / "run")
    assert code == 0 and "is 1-D" in said and "is int64" in said and "has no rows" in said
    assert [*about(tmp_path / "run")] == ["a"]
    assert "is 1-D" in refused("import", folder / "b.npy", "--to", tmp_path / "no")


class Harmful:
    def __reduce__(self) -> object:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    "kind", ["objects", "fields", "archive", "cut", "garbage", "empty", "long", "endless"]
)
def test_files_that_are_none(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "t", a=np.ones((50, 4)))
    path = folder / "b.npy"
    match kind:
        case "objects":
            np.save(path, np.array([[Harmful()]], object), allow_pickle=True)
        case "fields":
            np.save(path, np.zeros((3, 2), [("x", "f4")]))
        case "archive":
            with open(path, "wb") as file:
                np.savez(file, x=np.ones((2, 2)))
        case "cut":
            path.write_bytes((folder / "a.npy").read_bytes()[:-1])
        case "garbage":
            path.write_bytes(b"garbage" * 20)
        case "empty":
            path.write_bytes(b"")
        case "long":
            np.save(path, np.ones((2, 2), np.longdouble))
        case "endless":
            with open(path, "wb") as file:
                about = {"descr": "<f4", "fortran_order": False, "shape": (2**62, 3)}
                np.lib.format.write_array_header_1_0(file, about)
    if kind in ("fields", "long"):
        code, said = run("import", folder, "--to", tmp_path / "run")
        assert code == 0 and "which rows of a table cannot be" in said
        return
    said = refused("import", folder, "--to", tmp_path / "run")
    assert "b.npy is no" in said and "Notice" not in said
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_links_stay_in_the_folder(tmp_path: Path) -> None:
    folder, other = (
        saved(tmp_path / "t", a=np.ones((2, 2))),
        saved(tmp_path / "o", b=np.ones((2, 2))),
    )
    (folder / "c.npy").symlink_to("a.npy")
    assert [*imported(folder, tmp_path / "run")] == ["a", "c"]
    (folder / "b.npy").symlink_to(other / "b.npy")
    said = refused("import", folder, "--to", tmp_path / "no")
    assert "b.npy is a link out of its folder" in said
    assert [*imported(folder / "b.npy", tmp_path / "one")] == ["b"]
    (folder / "b.npy").unlink()
    (folder / "b.npy").symlink_to("nothing")
    assert "No such file" in refused("import", folder, "--to", tmp_path / "no")
    (folder / "b.npy").unlink()
    os.mkfifo(folder / "b.npy")
    assert "is no plain file" in refused("import", folder, "--to", tmp_path / "no")


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    from hotbed.checkpoint import write

    write(tmp_path / "run", {"a/b": [(torch.arange(2), torch.ones(2, 2))]}, rows={"a/b": 2})
    options = ("--to", tmp_path / "out", "--format", "npy")
    assert "'a/b' cannot name a file" in refused("dump", tmp_path / "run", *options)
    assert not (tmp_path / "out").exists()
    said = refused("dump", tmp_path / "run", "--to", tmp_path / "c.npy")
    assert "c.npy would be a folder of .npy files" in said
    assert run("dump", tmp_path / "run", *options, "--rename", "a/b=c")[0] == 0
    assert os.listdir(tmp_path / "out") == ["c.npy"]
