"""`hotbed train --checkpoint DIR --resume`: whatever ends a run, it goes on and ends where it would have."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from effort import examples

from hotbed.checkpoint.looking import differences
from hotbed.data import write_criteo_tsv

HOTBED = [sys.executable, "-c", "from hotbed_command import main; main()"]
SIZE = ["--dim", "4", "--batch-size", "32", "--every", "5", "--shuffle", "96", "--epochs", "2"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "clicks.tsv"
    write_criteo_tsv(str(path), rows=2000, seed=2)
    return path


def command(log: Path, folder: Path, *more: str) -> list[str]:
    return [
        *(*HOTBED, "train", "--data", str(log), *SIZE),
        *("--checkpoint", str(folder / "run"), "--json", str(folder / "figures.json"), *more),
    ]


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "figures.json").read_text())


def run(*given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*given), capture_output=True, text=True)


STORAGES = {
    "memory": [],
    "ssd": ["--host", "24MB", "--ssd", "SSD"],
}


@pytest.mark.process
@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(
    tmp_path: Path, log: Path, storage: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()

    def more(folder: Path) -> list[str]:
        return [str(folder / "rows") if part == "SSD" else part for part in STORAGES[storage]]

    done = run(log, whole, *more(whole))
    assert done.returncode == 0, done.stderr
    chance = random.Random(storage)
    for _ in range(examples(3, soak=50)):
        process = subprocess.Popen(
            command(log, killed, "--resume", *more(killed)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        began = time.monotonic()
        wait = chance.uniform(1.5, 6.0)
        while time.monotonic() - began < wait and process.poll() is None:
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read()
        process.stderr.close()
        assert process.wait() in (0, -signal.SIGKILL), said
    done = run(log, killed, "--resume", *more(killed))
    assert done.returncode == 0, done.stderr
    one, other = figures(whole), figures(killed)
    for name in ("auc", "logloss", "rows", "steps", "stored_rows"):
        assert one[name] == other[name], name
    for table in differences(str(whole / "run"), str(killed / "run")):
        assert (table.only_first, table.only_second, table.changed) == (0, 0, 0)
        assert table.equal


@pytest.mark.process
def test_what_is_refused(tmp_path: Path, log: Path) -> None:
    assert run(log, tmp_path).returncode == 0
    again = run(log, tmp_path)
    assert again.returncode == 2 and "holds checkpoints of a run" in again.stderr
    other = run(log, tmp_path, "--resume", "--lr", "0.5")
    assert other.returncode == 2 and "has --lr 0.001, and now it is 0.5" in other.stderr
    clash = run(log, tmp_path, "--trace", str(tmp_path / "run" / "step-000000000000" / "x"))
    assert clash.returncode == 2
    done = run(log, tmp_path, "--resume")
    assert done.returncode == 0 and figures(tmp_path)["resumed_at"] == figures(tmp_path)["steps"]
    assert len(list((tmp_path / "run").iterdir())) == 3
    alone = subprocess.run(
        [*HOTBED, "train", "--data", str(log), "--resume"],
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 2 and "name their folder" in alone.stderr
