"""`hotbed train --resume` with data that are not those of the run."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command_line import run
from torch import nn

import hotbed as hb
from hotbed.checkpoint.files import read_json_sealed, write_json_sealed
from hotbed.checkpoint.folder import complete_in
from hotbed.checkpoint.inspect import differences
from hotbed.data import CriteoLog, write_criteo_tsv

ROWS, BATCH = 480, 32
STEPS = -(-ROWS * 3 // 4 // BATCH)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.tsv"
    write_criteo_tsv(path, ROWS, seed=3, table_rows=[40] * 26)
    return path


def train(data: Path, folder: Path, *more: Any) -> Any:
    usual = ("--dim", 4, "--batch-size", BATCH, "--test-fraction", 0.25, "--every", 2, "--keep", 99)
    json_ = ("--json", folder / "figures.json")
    return run("train", "--data", data, "--checkpoint", folder / "run", *usual, *json_, *more)


def stopped(data: Path, folder: Path, step: int, *more: Any) -> None:
    """A run that was killed after a step."""
    folder.mkdir()
    assert train(data, folder, *more).exit_code == 0
    for path in complete_in(str(folder / "run")):
        if int(path.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    assert complete_in(str(folder / "run"))[-1].endswith(str(step))


def check_same(one: Path, other: Path) -> None:
    for table in differences(str(one / "run"), str(other / "run")):
        assert (table.only_first, table.only_second, table.changed) == (0, 0, 0)
        assert table.equal
    first, second = (json.loads((f / "figures.json").read_text()) for f in (one, other))
    for name in ("auc", "logloss", "rows", "steps", "stored_rows"):
        assert first[name] == second[name], name


def flipped(text: bytes) -> bytes:
    """One label in the middle is the other."""
    lines = text.splitlines(keepends=True)
    lines[200] = (b"1" if lines[200][:1] == b"0" else b"0") + lines[200][1:]
    return b"".join(lines)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "reversed": lambda text: b"".join(reversed(text.splitlines(keepends=True))),
    "a label": flipped,
    "two lines": lambda text: text.replace(b"\n", b"\n\n", 1),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_lines_are_refused(log: Path, tmp_path: Path, change: str, packed: bool) -> None:
    def write(text: bytes) -> None:
        log.write_bytes(gzip.compress(text) if packed else text)

    text = log.read_bytes()
    write(text)
    stopped(log, tmp_path / "a", 4)
    write(CHANGES[change](text))
    result = train(log, tmp_path / "a", "--resume")
    assert result.exit_code == 2
    assert "the lines of --data are not those that the run in" in result.output
    write(text)
    assert train(log, tmp_path / "a", "--resume").exit_code == 0


def test_data_that_were_compressed_since_are_the_same(log: Path, tmp_path: Path) -> None:
    stopped(log, tmp_path / "a", 4)
    log.write_bytes(gzip.compress(log.read_bytes()))
    assert train(log, tmp_path / "a", "--resume").exit_code == 0


@pytest.mark.parametrize("more", [(), ("--shuffle", 64)], ids=["in order", "shuffled"])
def test_a_log_that_has_grown_goes_on_as_if_it_had_been_so_long(
    log: Path, tmp_path: Path, more: tuple[Any, ...]
) -> None:
    text = log.read_bytes()
    log.write_bytes(text.rstrip(b"\n"))  # so that appending changes the end of the file
    stopped(log, tmp_path / "a", 4, *more)
    write_criteo_tsv(tmp_path / "more.tsv", 100, seed=4, table_rows=[40] * 26)
    log.write_bytes(text + (tmp_path / "more.tsv").read_bytes())
    result = train(log, tmp_path / "a", "--resume", *more)
    assert result.exit_code == 0, result.output
    assert "--data has 580 samples, and had 480" in " ".join(result.output.split())
    (tmp_path / "b").mkdir()
    assert train(log, tmp_path / "b", *more).exit_code == 0
    check_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("why", ["an epoch is over", "a window is cut", "a line was changed too"])
def test_a_log_that_has_grown_is_refused_where_batches_would_be_others(
    log: Path, tmp_path: Path, why: str
) -> None:
    more = ("--shuffle", 256) if why == "a window is cut" else ()
    stopped(
        log, tmp_path / "a", {"an epoch is over": STEPS, "a window is cut": 10}.get(why, 4), *more
    )
    text = log.read_bytes()
    if why == "a line was changed too":
        text = flipped(text)
    log.write_bytes(text + text)
    result = train(log, tmp_path / "a", "--resume", "--epochs", 2, *more)
    assert result.exit_code == 2
    assert "has samples in --data 480, and now it is 960" in " ".join(result.output.split())


def test_a_checkpoint_without_fingerprint_goes_on(log: Path, tmp_path: Path) -> None:
    stopped(log, tmp_path / "a", 4)
    for folder in complete_in(str(tmp_path / "a" / "run")):
        path = Path(folder) / "checkpoint.json"
        manifest: Any = read_json_sealed(str(path))[0]
        (pairs,) = manifest["values"]["loaders"][1].values()
        pairs[:] = [pair for pair in pairs if pair[0] != "crc32c"]
        del manifest["crc32c"]
        path.unlink()
        write_json_sealed(str(path), manifest)
    assert train(log, tmp_path / "a", "--resume").exit_code == 0


class Anything:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


@pytest.mark.parametrize(
    "states",
    [
        [],
        [{"epoch": 1}],
        [{"epoch": 1}, {"samples": 5}],
        [[1, 2], [3]],
        [None, None],
        [{"a": 1}, {"b": torch.ones(2)}],
        [1, "x"],
        [{"a": 1}, {"b": 2}, {"c": 3}],
    ],
)
def test_a_folder_of_somebodys_own_loop_is_refused(
    log: Path, tmp_path: Path, states: list[Any]
) -> None:
    hb.save(tmp_path / "run", nn.Linear(2, 2), step=1, loader=[Anything(state) for state in states])
    result = train(log, tmp_path, "--resume")
    assert result.exit_code == 2
    assert "holds no checkpoints of a run of `hotbed train`" in " ".join(result.output.split())


def test_a_fingerprint_is_of_lines(tmp_path: Path) -> None:
    whole, cut, rest = (tmp_path / name for name in ("whole", "cut", "rest"))
    write_criteo_tsv(whole, 50, seed=1)
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:20]).rstrip(b"\n"))
    rest.write_bytes(gzip.compress(b"".join(lines[20:])))
    expected = CriteoLog(whole).fingerprint()
    assert expected.rows == 50
    assert CriteoLog([cut, rest]).fingerprint() == expected
    assert CriteoLog(cut).fingerprint() == CriteoLog(whole).fingerprint(20)
    assert CriteoLog([rest, cut]).fingerprint() != expected
    assert CriteoLog(whole, rows=(3, 9)).fingerprint() == expected
