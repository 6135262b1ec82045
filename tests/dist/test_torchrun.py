"""`torchrun -m hotbed train`: the main job, on several processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from cli import command_line
from launching import torchrun, torchrun_anew

import hotbed as hb
from hotbed.checkpoint import load_model
from hotbed.checkpoint.folder import complete_in
from hotbed.checkpoint.inspect import differences
from hotbed.data import write_criteo_tsv
from hotbed.train.processes import first, process_group
from hotbed.train.settings import SettingsError

SIZE = ["--dim", "4", "--batch-size", "64", "--every", "10", "--shuffle", "96", "--lr", "0.01"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "clicks.tsv"
    write_criteo_tsv(str(path), rows=2001, seed=2)
    return path


def given(processes: int, *options: Any) -> list[str]:
    """To torchrun."""
    launcher = ["--nproc-per-node", str(processes), "--standalone"]
    launcher += ["--max-restarts", "1" if "--resume" in options else "0"]
    return [*launcher, "-m", "hotbed", "train", *map(str, options), *SIZE]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(said: Path, processes: int, *options: Any) -> subprocess.CompletedProcess[str]:
    done = launching.run(torchrun, given(processes, *options), said, environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def figures(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def assert_close(first: str, second: str) -> None:
    """Two models have the same rows, but for what other orders of sums make of them."""
    one, other = load_model(first), load_model(second)
    for name in one.embeddings.tables:
        (ids, rows), (other_ids, other_rows) = (m.embeddings.rows(name) for m in (one, other))
        assert torch.equal(ids, other_ids)
        torch.testing.assert_close(rows, other_rows, rtol=1e-3, atol=1e-3)


@pytest.mark.process
def test_any_number_of_processes_trains_on_the_same_batches(log: Path, tmp_path: Path) -> None:
    data = ["--data", log, "--checkpoint", tmp_path / "run", "--epochs", 1]
    said = tmp_path / "said"

    def kept(name: str) -> list[Any]:
        return ["--save", tmp_path / name, "--json", tmp_path / f"{name}.json"]

    alone = ["train", "--data", log, *kept("one"), "--epochs", 2, *SIZE]
    assert command_line.run(*alone).exit_code == 0
    ssd = ["--host", "24MB", "--ssd", tmp_path / "rows", "--background", "--full-every", 9]
    shown = run(said, 2, *data, "--json", tmp_path / "half.json", *ssd)
    assert shown.stdout.count("Done") == 1
    assert "Look-ahead" not in shown.stdout + shown.stderr
    assert sorted(p.name for p in (tmp_path / "rows").iterdir()) == ["rank-0", "rank-1"]
    # The run goes on with another number of processes, where all rows lie in memory.
    data[-1] = 2
    run(said, 3, *data, "--resume", *kept("two"))
    one, half, two = (figures(tmp_path / f"{name}.json") for name in ("one", "half", "two"))
    assert half["processes"] == 2 and half["tiers"]["rows_used"] > 0
    assert two["processes"] == 3 and two["resumed_at"] == half["steps"] == one["steps"] / 2
    for name in ("rows", "steps", "epochs", "test_rows", "stored_rows"):
        assert one[name] == two[name], name
    assert two["auc"] == pytest.approx(one["auc"], abs=2e-3)
    assert two["logloss"] == pytest.approx(one["logloss"], abs=2e-3)
    assert_close(str(tmp_path / "one"), str(tmp_path / "two"))


def workers_of(launcher: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            found += [int(entry.name)] if int(stat[1]) == launcher else []
    return found


SAVES: dict[str, list[Any]] = {
    "blocking": [],
    "background": ["--background"],
    "deltas": ["--background", "--full-every", 9, "--host", "24MB", "--ssd", "SSD"],
}


@pytest.mark.process
@pytest.mark.parametrize("saves", SAVES)
def test_a_killed_rank_costs_nothing_but_time(log: Path, tmp_path: Path, saves: str) -> None:
    said = tmp_path / "said"
    how = [tmp_path / "rows" if part == "SSD" else part for part in SAVES[saves]]
    run(said, 2, "--data", log, "--checkpoint", tmp_path / "expected", "--resume", *how)
    again = given(2, "--data", log, "--checkpoint", tmp_path / "run", "--resume", *how)
    launcher = launching.start(torchrun, again, said, environment())
    while len(complete_in(str(tmp_path / "run"))) < 2:
        assert launcher.exitcode is None
        time.sleep(0.02)
    os.kill(workers_of(launcher.pid)[0], signal.SIGKILL)
    try:
        launcher.join(60)
        assert launcher.exitcode == 0
    finally:
        launcher.kill()
    compared = list(differences(str(tmp_path / "expected"), str(tmp_path / "run")))
    assert len(compared) == 26 and all(each.equal for each in compared)
    assert not any(each.only_first or each.only_second or each.changed for each in compared)


@pytest.mark.process
def test_ctrl_c_ends_all_after_the_same_step(log: Path, tmp_path: Path) -> None:
    long = ["--data", log, "--checkpoint", tmp_path / "run", "--epochs", 999]
    long += ["--json", tmp_path / "figures.json"]
    launcher = launching.start(torchrun, given(2, *long), tmp_path / "said", environment())
    while len(complete_in(str(tmp_path / "run"))) < 2:
        assert launcher.exitcode is None
        time.sleep(0.02)
    os.kill(launcher.pid, signal.SIGINT)
    try:
        launcher.join(60)
        assert launcher.exitcode is not None
    finally:
        launcher.kill()
    told = figures(tmp_path / "figures.json")
    assert told["interrupted"] is True
    assert complete_in(str(tmp_path / "run"))[-1].endswith(f"{told['steps']:012d}")


@pytest.mark.process
def test_what_is_wrong_is_told(log: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tsv"
    bad.write_text(log.read_text() + "no sample\n")
    done = launching.run(
        torchrun, given(2, "--data", bad), tmp_path / "said", environment(), seconds=200
    )
    assert done.returncode != 0
    assert "bad.tsv" in done.stderr and "line 2002" in done.stderr


@pytest.mark.process
def test_the_example(log: Path, tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "many_processes.py"
    arguments = ["--nproc-per-node", "2", "--standalone", str(example), str(log), str(tmp_path)]
    done = launching.run(torchrun_anew, arguments, tmp_path / "said", environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2,001 samples") == 1


def test_version_of_the_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotbed", "--version"], capture_output=True, text=True
    )
    assert hb.__version__ in done.stdout


GROUP = """
from hotbed.train.processes import first, process_group
from hotbed.train.settings import SettingsError
with process_group() as several:
    import torch.distributed
    print(several, first(), torch.distributed.get_world_size())
"""


@pytest.mark.process
def test_processes_that_another_launcher_has_started(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    said = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    started = [
        launching.start(
            launching.python,
            ["-c", GROUP],
            tmp_path / rank,
            {**environment(), **said, "RANK": rank},
        )
        for rank in "01"
    ]
    for process in started:
        process.join(60)
    assert [(tmp_path / rank / "stdout").read_text() for rank in "01"] == [
        "True True 2\n",
        "True False 2\n",
    ]


def test_processes_that_cannot_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert first()  # whatever a rank is without others
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="MASTER_ADDR expected.*Start them with torchrun"):
        with process_group():
            pass
