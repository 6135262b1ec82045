"""Saved models that are damaged, swapped or hostile are an error that names the file."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from saved_models import bias_of, data_files, replace_file, seal, with_bias

from hotbed.checkpoint import files as saved_files
from hotbed.checkpoint.files import CheckpointError
from hotbed.train.saved import load_model, save_model


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
        with pytest.raises(CheckpointError, match=str(path)):
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
        manifest["files"]["tables"][0]["name"] = name
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
    "a number for a file": (
        edit(lambda m: m["files"]["tables"].append(7)),
        "names the file 7, which",
    ),
    "a file missing in the middle": (
        edit(lambda m: m["files"]["tables"].append({"name": "tables.1.3.safetensors"})),
        "names the file 'tables.1.3.safe",
    ),
    "a file of another save": (
        edit(lambda m: m["files"]["tables"].append({"name": "tables.2.2.safetensors"})),
        "names the file 'tables.2.2.safe",
    ),
    "no files": (edit(lambda m: m.pop("files")), "model.json is not what"),
    "files in a list": (edit(lambda m: m.update(files=[])), "model.json is not what"),
    "no checksums": (
        edit(lambda m: m["files"]["tables"][0].pop("crc32c")),
        "m/tables.1.safetensors has no size and checksums",
    ),
    "100 GB of tables": (
        edit(lambda m: m["files"]["tables"][0].update(bytes=10**11)),
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
    "a later format": (edit(lambda m: m.update(format=4)), "model.json is of format 4; .* reads 3"),
    "a format that is none": (edit(lambda m: m.update(format="2")), "model.json is not what"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_folder_is_an_error_that_names_the_file(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m"
    save_model(with_bias(1), str(path))
    damage, message = HOSTILE[what]
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        load_model(str(path))


def test_a_disk_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    save_model(with_bias(1), str(tmp_path / "m"))

    def fails(*arguments: Any) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(saved_files, "_checked_bytes", fails)
    with pytest.raises(CheckpointError, match="m' cannot be read: Input/output error."):
        load_model(str(tmp_path / "m"))
