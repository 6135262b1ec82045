"""The checkpoints of a folder with their states, and errors that name those that are whole."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved_models import with_bias
from typer.testing import CliRunner

import hotbed as hb
from hotbed.checkpoint import Checkpoint, CheckpointError, DamagedError, load_model, read
from hotbed.checkpoint.chain import Chains
from hotbed.checkpoint.inspect import contents, differences
from hotbed.checkpoint.new import new_folder
from hotbed.cli.app import app

ROWS, MANIFEST = "rows-0-0.safetensors", "checkpoint.json"


def flip(path: Path) -> None:
    """Flip a bit: of a manifest the first, as what the one in its middle breaks depends on its length."""
    contents = bytearray(path.read_bytes())
    contents[0 if path.name == MANIFEST else len(contents) // 2] ^= 1
    path.write_bytes(contents)


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    return [Path(hb.save(tmp_path, with_bias(n), step=n).path) for n in range(1, 6)]


def states_in(path: Any) -> list[tuple[int | None, str]]:
    return [(one.step, one.state) for one in hb.checkpoint.list(path)]


def test_each_has_its_state(tmp_path: Path, saved: list[Path]) -> None:
    (saved[1] / ROWS).unlink()
    os.truncate(saved[2] / ROWS, 7)
    flip(saved[3] / MANIFEST)
    (saved[0] / "notes.txt").write_text("mine")
    (tmp_path / "step-000000000009").mkdir()
    with new_folder(str(tmp_path), 10):
        found = hb.checkpoint.list(tmp_path)
    assert [(one.step, one.state) for one in found] == [
        (1, "whole"),
        *((step, "damaged") for step in (2, 3, 4)),
        (5, "whole"),
        (9, "incomplete"),
        (10, "being written"),
    ]
    assert [one.path for one in found[:5]] == [*map(str, saved)]
    reasons = ["", f"{ROWS} is missing", "has 7 bytes and was", "or damaged", ""]
    for one, reason in zip(found, [*reasons, "did not end", "being written"], strict=True):
        assert reason in one.reason and bool(one.reason) == bool(reason)
    files = [path for path in saved[0].iterdir() if path.suffix == ".safetensors"]
    assert found[0].bytes == sum(path.stat().st_size for path in files)
    age = datetime.datetime.now(datetime.timezone.utc) - found[0].when
    assert datetime.timedelta(0) <= age < datetime.timedelta(hours=1)


def test_the_last_whole_one_is_the_latest(tmp_path: Path, saved: list[Path]) -> None:
    last = hb.save(tmp_path, with_bias(0), step=2)
    found = hb.checkpoint.list(tmp_path)[-1]
    assert isinstance(found, Checkpoint)
    assert found.path == last.path == hb.checkpoint.latest(tmp_path)
    assert (found.step, found.bytes) == (2, last.bytes)


def test_a_checkpoint_itself_and_none(tmp_path: Path, saved: list[Path]) -> None:
    other = saved[2].rename(tmp_path / "mine")
    assert states_in(other) == [(3, "whole")]
    (other / ROWS).unlink()
    assert states_in(other) == [(None, "damaged")]
    assert states_in(saved[0]) == [(1, "whole")]
    assert states_in(tmp_path / "none") == states_in(tmp_path / "mine" / ROWS) == []


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo])
def test_what_is_no_folder_is_no_checkpoint(
    tmp_path: Path, saved: list[Path], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "step-000000000007")
    assert states_in(tmp_path) == [(n, "whole") for n in range(1, 6)]
    assert run("show", tmp_path)[0] == run("verify", "--all", tmp_path)[0] == 0
    assert hb.save(tmp_path, with_bias(8), step=7).path == hb.checkpoint.latest(tmp_path)


def test_one_that_goes_meanwhile_is_not_listed(
    tmp_path: Path, saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Chains.fault

    def remove(chains: Chains, folder: str) -> str:
        if folder == str(saved[1]):
            (saved[1] / MANIFEST).unlink()
        return real(chains, folder)

    monkeypatch.setattr(Chains, "fault", remove)
    assert states_in(tmp_path) == [(n, "whole") for n in (1, 3, 4, 5)]


# -- errors ------------------------------------------------------------------------------------------


READERS: dict[str, Callable[[Path], Any]] = {
    "load": lambda run: hb.load(run, with_bias(0)),
    "load_model": load_model,
    "read": lambda run: [*read(run, "embeddings.a"), *read(run, "embeddings.b")],
    "differences": lambda run: [*differences(str(run), str(run))],
}


def lose(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    os.truncate(path, 20)


DAMAGES = {
    "rows": (ROWS, flip),
    "no rows": (ROWS, lose),
    "dense": ("dense.safetensors", flip),
    "manifest": (MANIFEST, flip),
    "short manifest": (MANIFEST, shorten),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_whole_ones_are_named_where_the_latest_is_damaged(
    tmp_path: Path, saved: list[Path], damage: str, reader: str
) -> None:
    name, harm = DAMAGES[damage]
    if name == "dense.safetensors" and reader in ("read", "differences"):
        return  # which they do not read
    (saved[2] / ROWS).unlink()
    harm(saved[4] / name)
    with pytest.raises(DamagedError, match=f"{saved[4]}/{name}") as error:
        READERS[reader](tmp_path)
    assert error.value.others == [str(saved[at]) for at in (3, 1, 0)]
    names = "step-000000000004, step-000000000002, step-000000000001. Load one by "
    assert f"{names}hotbed.load('{saved[3]}', ...). " in str(error.value)
    assert f"hotbed checkpoint verify --all {tmp_path}" in str(error.value)
    hb.load(saved[3], with_bias(0))


def test_where_none_is_whole(tmp_path: Path) -> None:
    folder = Path(hb.save(tmp_path, with_bias(1), step=1).path)
    flip(folder / MANIFEST)
    with pytest.raises(DamagedError, match=r"No other checkpoint beside it is whole\."):
        contents(str(tmp_path))
    elsewhere = folder.rename(tmp_path / "mine")
    with pytest.raises(DamagedError, match="No other checkpoint"):
        contents(str(elsewhere))


def test_what_does_not_fit_is_no_damage(tmp_path: Path, saved: list[Path]) -> None:
    with pytest.raises(CheckpointError) as error:
        hb.load(tmp_path, torch.nn.Linear(1, 1))
    assert not isinstance(error.value, DamagedError) and "beside it" not in str(error.value)


# -- commands ----------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_the_commands(tmp_path: Path, saved: list[Path]) -> None:
    flip(saved[1] / ROWS)
    (saved[2] / ROWS).unlink()
    flip(saved[3] / MANIFEST)
    (tmp_path / "step-000000000009").mkdir()
    code, said = run("show", tmp_path, "--json", tmp_path / "shown.json")
    assert code == 0 and "damaged" in said and "incomplete" in said and "step 5" in said
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown["step"] == 5
    states = ["whole", "whole", "damaged", "damaged", "whole", "incomplete"]
    assert [one["state"] for one in shown["checkpoints"]] == states
    assert datetime.datetime.fromisoformat(shown["checkpoints"][0]["when"])
    assert run("verify", tmp_path)[0] == 0
    code, said = run("verify", "--all", tmp_path)
    assert code == 1
    for at, end in ((0, "is whole"), (1, "is damaged, see above"), (4, "is whole")):
        assert f"{saved[at]} {end}" in said
    assert f"{saved[1]}/{ROWS} is damaged: bytes" in said
    assert f"{saved[2]}/{ROWS} is missing" in said and f"{saved[3]}/{MANIFEST} is no" in said
    assert "Load one by" not in said
    assert f"{tmp_path}/step-000000000009 is incomplete." in said

    flip(saved[4] / ROWS)
    code, said = run("verify", tmp_path)
    assert code == 1 and f"verify --all {tmp_path}" in said
    assert "Whole by their sizes: step-000000000002, step-000000000001." in said
    for at in (1, 4):
        flip(saved[at] / ROWS)
    for path in (saved[2], saved[3]):
        (path / MANIFEST).unlink()
    assert run("verify", "--all", tmp_path)[0] == 0
    code, said = run("verify", "--all", tmp_path / "none")
    assert code == 2 and "no folder" in said


def test_show_lists_them_also_where_the_latest_is_damaged(
    tmp_path: Path, saved: list[Path]
) -> None:
    flip(saved[4] / MANIFEST)
    code, said = run("show", tmp_path)
    assert code == 2 and "step-000000000004" in said and "damaged" in said
