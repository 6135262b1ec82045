"""Checkpoints that are damaged, or made by somebody else: an error that names the file."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.small_models import made, train
from safetensors.torch import load_file, save_file

import hotbed as hb
from hotbed import _core
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.files import write_json_sealed
from hotbed.errors import OptimizerError

DENSE, ROWS, MANIFEST = "dense.safetensors", "rows-0-0.safetensors", "checkpoint.json"
FILES = (DENSE, ROWS, MANIFEST)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    model, optimizer = made("memory", folder, "Adam", untouched="exact")
    train(model, optimizer, range(3))
    return Path(hb.save(folder, model, optimizer, step=3).path)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refused(folder: Path, says: str) -> None:
    model, optimizer = made("memory", folder.parent, "Adam", untouched="exact")
    with pytest.raises(CheckpointError, match=says) as error:
        hb.load(folder, model, optimizer)
    assert str(folder) in str(error.value)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that is another's, with a right checksum."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["crc32c"]
    change(manifest)
    (folder / MANIFEST).unlink()
    write_json_sealed(str(folder / MANIFEST), manifest)


def resealed(folder: Path, name: str) -> None:
    """A file that was changed, whose checksums were too."""
    import numpy as np

    contents = (folder / name).read_bytes()
    crc = f"{_core.crc32c(np.frombuffer(bytearray(contents), np.uint8)):08x}"

    def change(manifest: dict[str, Any]) -> None:
        (file,) = (file for file in manifest["files"] if file["name"] == name)
        file |= {"bytes": len(contents), "crc32c": [crc]}

    rewritten(folder, change)


def test_the_copy_itself_is_good(copy: Path) -> None:
    model, optimizer = made("memory", copy.parent, "Adam", untouched="exact")
    assert hb.load(copy, model, optimizer).step == 3


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_shorter_longer_or_gone(copy: Path, name: str) -> None:
    path = copy / name
    contents = path.read_bytes()
    for other in (contents[:-1], contents[: len(contents) // 2], b"", contents + b"x"):
        path.write_bytes(other)
        refused(copy, name)
    path.unlink()
    refused(copy, "no checkpoint" if name == MANIFEST else f"{name} is missing")
    path.mkdir()
    refused(copy, "no checkpoint" if name == MANIFEST else f"{name} is no plain file")
    path.rmdir()
    os.mkfifo(path)  # which nobody writes to
    refused(copy, "no checkpoint" if name == MANIFEST else f"{name} is no plain file")


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(copy: Path, name: str) -> None:
    path = copy / name
    contents = bytearray(path.read_bytes())
    for at in range(0, len(contents), max(1, len(contents) // 40)):
        contents[at] ^= 1 << at % 8
        path.write_bytes(contents)
        refused(copy, name)
        contents[at] ^= 1 << at % 8


@pytest.mark.parametrize("name", [DENSE, ROWS])
def test_links_are_not_followed(copy: Path, name: str) -> None:
    outside = copy.parent / "outside"
    shutil.move(copy / name, outside)
    (copy / name).symlink_to(outside)
    refused(copy, f"{name} is a link")
    assert outside.exists()


@pytest.mark.parametrize("name", [DENSE, ROWS])
def test_a_header_that_claims_much_takes_no_memory(copy: Path, name: str) -> None:
    header = json.dumps(
        {"x": {"dtype": "F32", "shape": [25 << 30], "data_offsets": [0, 100 << 30]}}
    ).encode()
    (copy / name).write_bytes(struct.pack("<Q", len(header)) + header)
    resealed(copy, name)
    refused(copy, name)
    (copy / name).write_bytes(struct.pack("<Q", 100 << 30))
    resealed(copy, name)
    refused(copy, name)


def test_files_of_another_checkpoint(copy: Path, tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(9))
    other = Path(hb.save(tmp_path / "other", model, optimizer, step=9).path)
    for name in (DENSE, ROWS):
        contents = (copy / name).read_bytes()
        shutil.copy(other / name, copy / name)
        refused(copy, name)
        (copy / name).write_bytes(contents)


def test_chunks_that_changed_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a file, and of the files of two tables."""
    monkeypatch.setattr("hotbed.checkpoint.tensors.CHUNK_BYTES", 256)
    monkeypatch.setattr("hotbed.checkpoint.rows.FILE_BYTES", 1)
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(3))
    folder = Path(hb.save(tmp_path / "run", model, optimizer, step=3).path)
    one, other = folder / ROWS, folder / "rows-0-1.safetensors"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(first[256:512] + first[:256] + first[512:])
    refused(folder, f"{ROWS} is damaged: bytes 0 to 256 ")
    one.write_bytes(first[:512] + first[768:1024] + first[512:768] + first[1024:])
    refused(folder, f"{ROWS} is damaged: bytes 512 to 768 ")
    one.write_bytes(first[:512] + second[512:768] + first[768:])
    refused(folder, f"{ROWS} is damaged: bytes 512 to 768 ")
    one.write_bytes(second)
    other.write_bytes(first)
    refused(folder, ROWS)


def _number(manifest: dict[str, Any], where: str, name: str, value: float) -> None:
    """Changes a number in the history of a table's steps."""
    history = manifest["tables"]["embeddings.item"]["rule"]["history"]
    numbers = history["last"] if where == "last" else history["runs"][0]
    numbers[history["numbers"].index(name) + (where == "runs")] = value


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a later version": (lambda m: m.update(version=3), "is of version 3; this Hotbed reads 2"),
    "another format": (lambda m: m.update(format="x"), "is no manifest"),
    "a base by name": (lambda m: m.update(base="step-1"), "lacks entries"),
    "a base elsewhere": (lambda m: m.update(base={"name": "../a", "uid": 32 * "0"}), "its base"),
    "a base with a zero byte": (
        lambda m: m.update(base={"name": "a\0b", "uid": 32 * "0"}),
        "its base",
    ),
    "a base without uid": (lambda m: m.update(base={"name": "a", "uid": ""}), "its base"),
    "a base that is gone": (
        lambda m: m.update(base={"name": "step-1", "uid": 32 * "0"}),
        "has changed since step-1, which cannot be read: .*is missing",
    ),
    "rows that went of a whole one": (
        lambda m: m["tables"]["embeddings.item"].update(removed=1),
        "table 'embeddings.item' is incomplete",
    ),
    "a name outside": (
        lambda m: m["files"][1].update(name="../rows-0-0.safetensors"),
        r"names the file '../rows-0-0",
    ),
    "an absolute name": (lambda m: m["files"][1].update(name="/etc/passwd"), "names the file"),
    "a file twice": (lambda m: m["files"].append(m["files"][1]), "or twice"),
    "no files": (lambda m: m.update(files=[]), "names no file dense"),
    "no entries": (lambda m: m.pop("values"), "lacks entries"),
    "an odd table": (lambda m: m["tables"]["embeddings.item"].update(dim="4"), "is incomplete"),
    "an odd key": (lambda m: m["tables"]["embeddings.item"].update(key="-1"), "is incomplete"),
    "rows of no table": (lambda m: m["files"][1]["rows"].update(x={}), "which is no such table"),
    "columns outside": (
        lambda m: m["files"][1]["rows"]["embeddings.item"].update(columns=[0, 5]),
        "which is no such table",
    ),
    "a value of another kind": (
        lambda m: m["values"]["random"].update(pickle="x"),
        "cannot be loaded|is no value",
    ),
    "a long history": (
        lambda m: m["tables"]["embeddings.item"]["rule"]["history"]["runs"][0].__setitem__(
            0, 2**62
        ),
        "no such numbers",
    ),
    "more steps than any": (
        lambda m: (
            m["tables"]["embeddings.item"]["rule"].update(steps=2**41),
            m["tables"]["embeddings.item"]["rule"]["history"]["runs"][0].__setitem__(0, 2**41),
        ),
        "no such numbers",
    ),
    "other steps": (
        lambda m: m["tables"]["embeddings.item"]["rule"].update(steps=77),
        "no such numbers",
    ),
    "betas that no step can have had": (
        lambda m: _number(m, "runs", "beta1", -1.5),
        "checkpoint.json: table 'embeddings.item': .* beta1 is -1.5, which is outside",
    ),
    "a last step that none can have been": (
        lambda m: _number(m, "last", "lr", float("nan")),
        "checkpoint.json: table 'embeddings.item': .* lr is nan, which is outside",
    ),
    "moments that never fade": (
        lambda m: _number(m, "runs", "beta2", 0.0),
        "checkpoint.json: table 'embeddings.item': .* has no bound",
    ),
    "effects of steps that are no numbers": (
        lambda m: m["tables"]["embeddings.item"]["rule"]["history"].update(base=[1e999] * 5),
        "checkpoint.json: table 'embeddings.item': .* no such numbers",
    ),
    "an odd history": (
        lambda m: m["tables"]["embeddings.item"]["rule"]["history"].update(runs=[[-1]]),
        "the history of its steps is incomplete",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_manifests_of_others(copy: Path, what: str) -> None:
    change, says = CHANGES[what]
    rewritten(copy, change)
    refused(copy, says)


@pytest.mark.parametrize("what", ["steps", "short", "type", "late"])
def test_steps_that_a_row_cannot_have(copy: Path, what: str) -> None:
    tensors = load_file(copy / ROWS)
    steps = tensors["embeddings.item/steps"]
    other = {
        "steps": steps - 5,
        "short": steps[:-1],
        "type": steps.to(torch.int8),
        "late": steps + 10**6,
    }
    save_file({**tensors, "embeddings.item/steps": other[what].contiguous()}, copy / ROWS)
    resealed(copy, ROWS)
    refused(copy, ROWS)


def test_a_load_that_failed_can_be_tried_again(copy: Path) -> None:
    contents = (copy / ROWS).read_bytes()
    (copy / ROWS).write_bytes(contents[:-1])
    model, _ = made("memory", copy.parent)
    bare = type(model)("memory", copy.parent)
    with pytest.raises(CheckpointError, match=ROWS):
        hb.load(copy, bare)
    assert bare.embeddings.table("item").rule is None
    (copy / ROWS).write_bytes(contents)
    assert hb.load(copy, bare).step == 3


def test_what_is_wrong_with_an_optimizer_names_the_file(copy: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        (optimizer,) = manifest["values"]["optimizers"]
        text = json.dumps(optimizer)
        assert '["betas", {"tuple": [0.9, 0.999]}]' in text
        changed = text.replace('{"tuple": [0.9, 0.999]}', '{"tuple": [-1.5, 0.999]}')
        manifest["values"]["optimizers"] = [json.loads(changed)]

    rewritten(copy, change)
    model, optimizer = made("memory", copy.parent, "Adam", untouched="exact")
    with pytest.raises(OptimizerError, match="betas of group 0 is .* outside") as error:
        hb.load(copy, model, optimizer)
    assert str(error.value).startswith(f"{copy}/checkpoint.json: Adam: ")
    model, other = made("memory", copy.parent, "Adagrad")
    with pytest.raises(CheckpointError, match="was saved with another optimizer") as refused_:
        hb.load(copy, model, other)
    assert str(copy) in str(refused_.value)


def test_what_is_not_known_is_passed_over(copy: Path) -> None:
    rewritten(copy, lambda m: m.update(comment="mine"))
    rewritten(copy, lambda m: m["tables"]["embeddings.item"].update(comment="mine"))
    model, optimizer = made("memory", copy.parent, "Adam", untouched="exact")
    assert hb.load(copy, model, optimizer).step == 3
