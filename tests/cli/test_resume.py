"""`hotbed train --checkpoint DIR --resume`: whatever ends a run, it goes on and ends where it would have."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import launching
import pytest
from effort import examples
from launching import hotbed

from hotbed.checkpoint.folder import complete_in
from hotbed.checkpoint.inspect import differences, verified
from hotbed.data import write_criteo_tsv

SIZE = ["--dim", "4", "--batch-size", "32", "--every", "5", "--shuffle", "96", "--epochs", "2"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "clicks.tsv"
    write_criteo_tsv(str(path), rows=2000, seed=2)
    return path


def given(log: Path, folder: Path, *more: str) -> list[str]:
    """To the command."""
    return [
        *("train", "--data", str(log), *SIZE),
        *("--checkpoint", str(folder / "run"), "--json", str(folder / "figures.json"), *more),
    ]


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "figures.json").read_text())


def run(log: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return launching.run(hotbed, given(log, folder, *more), folder / "said")


STORAGES = {
    "memory": [],
    "ssd": ["--host", "24MB", "--ssd", "SSD"],
    "deltas": ["--full-every", "4"],
    "background": ["--background"],
    "ssd background": ["--host", "8MB", "--ssd", "SSD", "--background"],
    "background deltas": ["--background", "--full-every", "4"],
    "linked": ["--host", "8MB", "--ssd", "SSD", "--linked"],
    "linked deltas": [
        "--host",
        "8MB",
        "--ssd",
        "SSD",
        "--linked",
        "--background",
        "--full-every",
        "3",
    ],
}


def killed(log: Path, folder: Path, chance: random.Random, *more: str) -> bool:
    """Starts a training and kills it: at any moment, and mostly one at which it has begun to save. Whether
    it was killed before its end."""
    run, said = folder / "run", folder / "said"
    before = names_in(run)
    process = launching.start(hotbed, given(log, folder, *more), said)
    if chance.random() < 0.1:
        time.sleep(chance.uniform(0, 3))
    else:
        while process.exitcode is None and names_in(run) == before:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.2))
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), (said / "stderr").read_text()
    return process.exitcode != 0


def names_in(run: Path) -> list[str]:
    return sorted(os.listdir(run)) if run.exists() else []


def check_same(whole: Path, other: Path) -> None:
    """Two runs have ended with the same bits."""
    one, two = figures(whole), figures(other)
    for name in ("auc", "logloss", "rows", "steps", "stored_rows"):
        assert one[name] == two[name], name
    for table in differences(str(whole / "run"), str(other / "run")):
        assert (table.only_first, table.only_second, table.changed) == (0, 0, 0)
        assert table.equal


@pytest.mark.process
@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(
    tmp_path: Path, log: Path, storage: str
) -> None:
    def more(folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        return [str(folder / "rows") if part == "SSD" else part for part in STORAGES[storage]]

    whole = tmp_path / "whole"
    done = run(log, whole, *more(whole))
    assert done.returncode == 0, done.stderr
    chance = random.Random(storage)
    kills, runs = 0, 0
    while kills < examples(3, soak=50):
        other = tmp_path / str(runs)
        if killed(log, other, chance, "--resume", *more(other)):
            kills += 1
            for path in complete_in(str(other / "run")):
                assert [fault for _, _, fault in verified(path) if fault] == []
        else:
            check_same(whole, other)
            runs += 1
    other = tmp_path / str(runs)
    done = run(log, other, "--resume", *more(other))
    assert done.returncode == 0, done.stderr
    check_same(whole, other)


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
    alone = launching.run(hotbed, ["train", "--data", str(log), "--resume"], tmp_path / "said")
    assert alone.returncode == 2 and "name their folder" in alone.stderr
