"""How one saved model takes the place of another, and what a folder must be to be one."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from safetensors.torch import save
from saved_models import bias_of, data_files, replace_file, seal, with_bias

from hotbed.train import saved_files
from hotbed.train.report import OutputError
from hotbed.train.saved import load_model, save_model
from hotbed.train.saved_files import SavedModelError
from hotbed.train.saved_folder import check_writable_folder, is_own_file


def names_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def names_of_model(number: int) -> list[str]:
    return [f"dense.{number}.safetensors", "model.json", f"tables.{number}.safetensors"]


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
    with pytest.raises(SavedModelError, match=r"m/model.json is of format 1; .* reads 2. Train"):
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


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_is_full_at_any_write_costs_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
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
            assert own in (names_of_model(1), names_of_model(2))
        save_model(with_bias(3), str(path))
        assert bias_of(path) == 3 and (path / "notes").exists() == there
        assert len(names_in(path)) == 3 + there
    assert at >= 8 and left == ({1, 2} if there else {0, 2})


KILLED = """
import os, pathlib, sys, torch
sys.path.insert(0, sys.argv[2])
from saved_models import with_bias
from hotbed.train.saved import save_model
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
@pytest.mark.parametrize("there", [False, True])
def test_a_process_killed_at_any_call_leaves_one_of_the_two(tmp_path: Path, there: bool) -> None:
    """Before each call of the system in turn; each time the next save removes what was left."""
    code = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent), str(there)]
    subprocess.run(code, check=True)
    left = set()
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name[1:]))
    for path in folders:
        left.add(bias_of(path) if there or (path / "model.json").exists() else 0.0)
        check_writable_folder(str(path))
        save_model(with_bias(3), str(path))
        assert bias_of(path) == 3
        own = [name for name in names_in(path) if name != "notes"]
        assert own in (names_of_model(1), names_of_model(2))
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


# -- what is read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.json", "dense", "tables"])
def test_every_flipped_bit_is_found(tmp_path: Path, file: str) -> None:
    save_model(with_bias(1), str(tmp_path))
    path = dict(zip(("dense", "tables"), data_files(tmp_path), strict=True)).get(
        file, tmp_path / file
    )
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(examples(60)):
        bit = draw.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(SavedModelError, match=str(path)):
            load_model(str(tmp_path))
    path.write_bytes(whole)
    assert bias_of(tmp_path) == 1


def of_data(number: int, change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: change(data_files(path)[number])


def swap(path: Path) -> None:
    dense, tables = data_files(path)
    dense.rename(path / "x")
    tables.rename(dense)
    (path / "x").rename(tables)


def mix(path: Path) -> None:
    """The tables of another model of the same sizes."""
    other = path.parent / "other"
    model = with_bias(1)
    model.embeddings.assign("a", torch.tensor([1]), torch.ones(1, 4))
    save_model(model, str(other))
    data_files(path)[1].write_bytes(data_files(other)[1].read_bytes())


def move_out(file: Path) -> None:
    file.rename(file.parents[1] / "moved")
    file.symlink_to(file.parents[1] / "moved")


def into_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def into_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def named(name: Any) -> Callable[[Path], None]:
    """A manifest that names another file for the tables."""

    def change(path: Path) -> None:
        manifest = json.loads((path / "model.json").read_text())
        data_files(path)[1].rename(path.parent / "moved")
        manifest["files"]["tables"]["name"] = name
        seal(path / "model.json", manifest)

    return change


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        manifest = json.loads((path / "model.json").read_text())
        change(manifest)
        seal(path / "model.json", manifest)

    return damage


def at_manifest(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: change(path / "model.json")


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (at_manifest(Path.unlink), "m/model.json is missing"),
    "no dense part": (of_data(0, Path.unlink), "m/dense.1.safetensors is missing"),
    "no tables": (of_data(1, Path.unlink), "m/tables.1.safetensors is missing"),
    "tables cut short": (
        of_data(1, lambda file: os.truncate(file, file.stat().st_size - 5)),
        r"m/tables.1.safetensors has [\d,]+ bytes and was saved with [\d,]+\.",
    ),
    "empty tables": (of_data(1, lambda file: os.truncate(file, 0)), "m/tables.1.* has 0 bytes"),
    "tables with bytes behind": (
        of_data(1, lambda file: file.write_bytes(file.read_bytes() + b"\0")),
        "m/tables.1.* bytes and was saved with",
    ),
    "an empty manifest": (at_manifest(lambda file: os.truncate(file, 0)), "model.json is damaged"),
    "files swapped": (swap, "m/dense.1.safetensors has .* bytes"),
    "tables of another model": (mix, "m/tables.1.safetensors is damaged: bytes 0 to"),
    "a folder for the manifest": (at_manifest(into_folder), "m/model.json is no plain file"),
    "a folder for the dense part": (of_data(0, into_folder), "m/dense.1.* is no plain file"),
    "a folder for the tables": (of_data(1, into_folder), "m/tables.1.* is no plain file"),
    "a pipe for the manifest": (at_manifest(into_pipe), "m/model.json is no plain file"),
    "a pipe for the tables": (of_data(1, into_pipe), "m/tables.1.safetensors is no plain file"),
    "a link out of the folder": (of_data(1, move_out), "m/tables.1.safetensors is a link"),
    "a manifest that is a link": (at_manifest(move_out), "m/model.json is a link"),
    "tables above the folder": (named("../moved"), r"model.json names the file '\.\./moved'"),
    "tables by a whole path": (named("/etc/passwd"), "model.json names the file '/etc/passwd'"),
    "the dense part for tables": (named("dense.1.safetensors"), "names the file 'dense.1.safe"),
    "tables of no name": (named(None), "names the file None"),
    "no files": (edit(lambda m: m.pop("files")), "model.json is not what"),
    "files in a list": (edit(lambda m: m.update(files=[])), "model.json is not what"),
    "no checksums": (
        edit(lambda m: m["files"]["tables"].pop("crc32c")),
        "m/tables.1.safetensors has no size and checksums",
    ),
    "100 GB of tables": (
        edit(lambda m: m["files"]["tables"].update(bytes=10**11)),
        "m/tables.1.* was saved with 100,000,000,000",
    ),
    "a header of 100 GB": (
        lambda path: replace_file(path, "tables", (10**11).to_bytes(8, "little") + b"{}"),
        "m/tables.1.safetensors is no safetensors file",
    ),
    "a manifest that was edited": (
        at_manifest(lambda file: file.write_text(file.read_text().replace('"dim": 4', '"dim": 8'))),
        "m/model.json is damaged, or was changed",
    ),
    "a manifest in other words": (
        at_manifest(lambda file: file.write_text(json.dumps(json.loads(file.read_text())))),
        "m/model.json is damaged, or was changed",
    ),
    "no JSON": (at_manifest(lambda file: file.write_bytes(b"\xff\xfe")), "model.json is damaged"),
    "deep JSON": (at_manifest(lambda file: file.write_text("[" * 10**5)), "model.json is damaged"),
    "a list": (at_manifest(lambda file: file.write_text("[]")), "model.json is damaged"),
    "a later format": (edit(lambda m: m.update(format=3)), "model.json is of format 3; .* reads 2"),
    "a format that is none": (edit(lambda m: m.update(format="2")), "model.json is not what"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_folder_is_an_error_that_names_the_file(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m"
    save_model(with_bias(1), str(path))
    damage, message = HOSTILE[what]
    damage(path)
    with pytest.raises(SavedModelError, match=message):
        load_model(str(path))


def test_a_disk_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    save_model(with_bias(1), str(tmp_path / "m"))

    def fails(*arguments: Any) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(saved_files, "_filled", fails)
    with pytest.raises(SavedModelError, match="m' cannot be read: Input/output error."):
        load_model(str(tmp_path / "m"))
