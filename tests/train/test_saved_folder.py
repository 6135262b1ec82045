"""How one saved model takes the place of another, and what a folder must be to be one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from saved_models import bias_of, seal, with_bias

from hotbed.checkpoint import files as saved_files
from hotbed.checkpoint.files import CheckpointError
from hotbed.train import saved
from hotbed.train.report import OutputError
from hotbed.train.saved import load_model, save_model
from hotbed.train.saved_folder import check_writable_folder, is_own_file


def names_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def names_of_model(number: int, files: int = 1) -> list[str]:
    more = [f"tables.{number}.{at}.safetensors" for at in range(2, files + 1)]
    return [
        f"dense.{number}.safetensors",
        "model.json",
        *more,
        f"tables.{number}.safetensors",
    ]


# One file for all rows, or one for each table and an empty one.
FILES = [1, 3]


def contents_of(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_a_folder_holds_three_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "m"
    check_writable_folder(str(path))
    assert not path.exists()
    for number, bias in ((1, 10), (2, 20), (1, 30)):
        save_model(with_bias(bias), str(path))
        assert names_in(path) == names_of_model(number) and bias_of(path) == bias
        assert all(is_own_file(name) for name in names_in(path))
        modes = {os.stat(path / name).st_mode for name in names_in(path)}
        assert len(modes) == 1
        check_writable_folder(str(path))
    assert names_in(tmp_path / "new") == ["m"]


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    path = tmp_path / "m"
    save_model(with_bias(1), str(path))
    mine = {
        "m/figures.json": b"{}",
        "m/notes/tables.1.safetensors": b"mine",
        "m/model.json.part": b"mine",
        "m/dense.1.safetensors.part": b"mine",
        "m/dense.3.safetensors": b"mine",
        "m.part/model.json": b"mine",
        "m.old/data.csv": b"mine",
    }
    for name, contents in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(contents)
    check_writable_folder(str(path))
    save_model(with_bias(2), str(path))
    save_model(with_bias(3), str(path))
    assert bias_of(path) == 3
    held = contents_of(tmp_path)
    assert {name: held.get(name) for name in mine} == mine
    assert set(held) - set(mine) == {f"m/{name}" for name in names_of_model(1)}


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    save_model(with_bias(1), str(tmp_path / "m"))
    (tmp_path / "link").symlink_to("m")
    check_writable_folder(str(tmp_path / "link"))
    save_model(with_bias(2), str(tmp_path / "link"))
    assert bias_of(tmp_path / "m") == 2 == bias_of(tmp_path / "link")
    assert names_in(tmp_path) == ["link", "m"] and (tmp_path / "link").is_symlink()


def test_a_copy_by_hard_links_stays_the_old_model(tmp_path: Path) -> None:
    save_model(with_bias(1), str(tmp_path / "m"))
    (tmp_path / "copy").mkdir()
    for name in names_in(tmp_path / "m"):
        os.link(tmp_path / "m" / name, tmp_path / "copy" / name)
    for bias in (2, 3, 4):
        save_model(with_bias(bias), str(tmp_path / "m"))
        assert bias_of(tmp_path / "copy") == 1


def make_model_of_format_1(path: Path) -> None:
    path.mkdir()
    manifest = {"format": 1, "model": "dlrm", "arguments": {}}
    (path / "model.json").write_text(json.dumps(manifest))
    for part in ("dense", "tables"):
        (path / f"{part}.safetensors").write_bytes(save({"x": torch.zeros(1)}))


def test_a_model_of_the_first_format_is_told_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m"
    make_model_of_format_1(path)
    (path / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match=r"m/model.json is of format 1; .* reads 3. Train"):
        load_model(str(path))
    check_writable_folder(str(path))
    save_model(with_bias(2), str(path))
    assert bias_of(path) == 2
    assert names_in(path) == sorted([*names_of_model(1), "notes"])


def not_ours(name: str, contents: bytes = b"mine") -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(contents) and None


FOREIGN = {
    "a manifest of somebody else": (not_ours("model.json", b"{}"), "model.json is of no saved"),
    "an empty manifest": (lambda path: (path / "model.json").write_bytes(b""), "is of no saved"),
    "a note of somebody else": (not_ours("saving.json"), "saving.json is not Hotbed's. Move"),
    "a note of other files": (
        lambda path: seal(path / "saving.json", {"files": ["../notes.txt"]}),
        "saving.json is not Hotbed's",
    ),
    "a file in the place of a new one": (
        not_ours("tables.2.safetensors"),
        "tables.2.safetensors there is no part of the model. Move it away",
    ),
    "a folder in the place of a new one": (
        lambda path: (path / "dense.2.safetensors").mkdir(),
        "dense.2.safetensors there is no part of the model",
    ),
    "a link in the place of a new one": (
        lambda path: (path / "model.next.json").symlink_to("nowhere"),
        "model.next.json there is no part of the model",
    ),
    "a manifest that is a link": (
        lambda path: (
            (path / "model.json").rename(path / "x"),
            (path / "model.json").symlink_to("x"),
        ),
        "model.json is a link",
    ),
    "a manifest that is a folder": (
        lambda path: ((path / "model.json").unlink(), (path / "model.json").mkdir()),
        "model.json is no plain file",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_not_ours_is_not_replaced(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m"
    save_model(with_bias(1), str(path))
    (tmp_path / "notes.txt").write_text("mine")
    change, message = FOREIGN[what]
    change(path)
    before, names = contents_of(tmp_path), names_in(path)
    for attempt in (check_writable_folder, lambda p: save_model(with_bias(2), p)):
        with pytest.raises(OutputError, match=f"Cannot save to '{path}': .*{message}"):
            attempt(str(path))
        assert contents_of(tmp_path) == before and names_in(path) == names


def test_a_folder_in_place_of_an_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "m"
    save_model(with_bias(1), str(path))
    (path / "tables.1.safetensors").unlink()
    (path / "tables.1.safetensors").mkdir()
    (path / "tables.1.safetensors" / "notes.txt").write_text("mine")
    save_model(with_bias(2), str(path))
    assert bias_of(path) == 2
    assert (path / "tables.1.safetensors" / "notes.txt").read_text() == "mine"
    assert names_in(path) == sorted([*names_of_model(2), "tables.1.safetensors"])


def test_a_folder_of_other_files_is_not_saved_to(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_writable_folder(str(tmp_path / "empty"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="the folder holds other files"):
        check_writable_folder(str(tmp_path / "other"))
    with pytest.raises(OutputError, match="it is a file"):
        check_writable_folder(str(tmp_path / "other" / "notes.txt"))
    with pytest.raises(OutputError, match="Not a directory"):
        check_writable_folder(str(tmp_path / "other" / "notes.txt" / "m"))


# -- a save that does not end ------------------------------------------------------------------------


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_is_full_at_any_write_costs_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, files: int
) -> None:
    if files > 1:
        monkeypatch.setattr(saved, "_BYTES_OF_A_FILE", 1)
    calls = 0

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(*arguments)

        return call

    left = set()
    for at in range(1, 100):
        path = tmp_path / f"m{at}"
        if there:
            save_model(with_bias(1), str(path))
            (path / "notes").write_text("mine")
        calls = 0
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace"):
                patch.setattr(saved_files.os, name, counted(getattr(os, name)))
            try:
                save_model(with_bias(2), str(path))
            except OutputError as error:
                assert f"Cannot save to '{path}': No space left on device." == str(error)
        if calls < at:
            break
        if not path.exists():
            left.add(0.0)
        else:
            left.add(bias_of(path))
            # Where the disk is full at the very end, the note stays until the next save.
            own = [name for name in names_in(path) if name not in ("notes", "saving.json")]
            assert own in (names_of_model(1, files), names_of_model(2, files))
        save_model(with_bias(3), str(path))
        assert bias_of(path) == 3 and (path / "notes").exists() == there
        assert len(names_in(path)) == 2 + files + there
    assert at >= 7 + files and left == ({1, 2} if there else {0, 2})


KILLED = """
import os, pathlib, sys, torch
sys.path.insert(0, sys.argv[2])
from saved_models import with_bias
from hotbed.train import saved
from hotbed.train.saved import save_model
if sys.argv[4] != "1":
    saved._BYTES_OF_A_FILE = 1
torch.set_num_threads(1)  # OpenMP's threads do not live on in a fork
folder, there = pathlib.Path(sys.argv[1]), sys.argv[3] == "True"
at = calls = 0
def counted(plain):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == at:
            os._exit(9)
        return plain(*arguments, **options)
    return call
second = with_bias(2)
ended = False
while not ended:
    at += 1
    path = folder / f"m{at}"
    if there:
        save_model(with_bias(1), str(path))
        (path / "notes").write_text("mine")
    child = os.fork()
    if not child:
        for name in ("open", "fsync", "replace", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        save_model(second, str(path))
        os._exit(0)
    ended = os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.process
@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("there", [False, True])
def test_a_process_killed_at_any_call_leaves_one_of_the_two(
    tmp_path: Path, there: bool, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each call of the system in turn; each time the next save removes what was left."""
    if files > 1:
        monkeypatch.setattr(saved, "_BYTES_OF_A_FILE", 1)
    here = str(Path(__file__).parent)
    code = [sys.executable, "-c", KILLED, str(tmp_path), here, str(there), str(files)]
    subprocess.run(code, check=True)
    left = set()
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name[1:]))
    for path in folders:
        left.add(bias_of(path) if there or (path / "model.json").exists() else 0.0)
        check_writable_folder(str(path))
        save_model(with_bias(3), str(path))
        assert bias_of(path) == 3
        own = [name for name in names_in(path) if name != "notes"]
        assert own in (names_of_model(1, files), names_of_model(2, files))
        assert (path / "notes").exists() == there
    assert len(folders) >= 15 and left == ({1, 2} if there else {0, 2})


def test_two_that_save_at_once_leave_one_model(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path = tmp_path / "m"
    models = [with_bias(bias) for bias in range(8)]
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save_model, model, str(path)) for model in models]
        loads = [pool.submit(bias_of, path) for _ in range(8)]
        for each in saves:
            each.result()
        for each in loads:
            if each.exception() is not None:  # before the first was there
                assert "There is no folder" in str(each.exception()) or "missing" in str(
                    each.exception()
                )
    assert bias_of(path) in range(8)
    assert names_in(path) in (names_of_model(1), names_of_model(2))
