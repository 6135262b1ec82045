"""`hotbed row-server`: rows of a run of `hotbed train` lie in processes that have no data."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import launching
import pytest
from cli import command_line
from dist.test_torchrun import SIZE, assert_close, environment, figures, workers_of
from launching import torchrun

from hotbed.checkpoint.folder import complete_in
from hotbed.data import write_criteo_tsv


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "clicks.tsv"
    write_criteo_tsv(str(path), rows=2001, seed=2)
    return path


def started(said: Path, trainers: int, hosts: list[str], train: list[Any]) -> list[Any]:
    """Two nodes: one that trains, one that keeps rows, each with a launcher."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    both = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "-m", "hotbed"]
    first = ["--node-rank", "0", "--nproc-per-node", str(trainers), *both, "train"]
    second = ["--node-rank", "1", "--nproc-per-node", "2", *both, "row-server", *hosts]
    said.mkdir()
    nodes = {"train": [*first, *map(str, train), *SIZE], "hosts": second}
    return [
        launching.start(torchrun, given, said / name, environment())
        for name, given in nodes.items()
    ]


def ended(nodes: list[Any], said: Path) -> None:
    for node, name in zip(nodes, ("train", "hosts"), strict=True):
        node.join(120)
        assert node.exitcode == 0, told_by(said / name)


def told_by(said: Path) -> str:
    """Return what a launcher and its processes have printed."""
    both = (said / name for name in ("stdout", "stderr"))
    return " ".join(" ".join(one.read_text() for one in both if one.exists()).split())


@pytest.mark.process
def test_a_run_with_row_servers_ends_as_one_without(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    train = ["--data", log, "--checkpoint", path, "--json", tmp_path / "two.json"]
    train += ["--local-world-size", 2]  # of which row servers are told
    ssd = ["--host", "24MB", "--ssd", str(tmp_path / "rows")]
    nodes = started(tmp_path / "said", 2, ssd, [*train, "--save", tmp_path / "two"])
    ended(nodes, tmp_path / "said")
    alone = ["train", "--data", log, "--json", tmp_path / "one.json", "--save", tmp_path / "one"]
    assert command_line.run(*alone, *SIZE).exit_code == 0
    one, two = (figures(tmp_path / f"{name}.json") for name in ("one", "two"))
    for name in ("rows", "steps", "test_rows", "stored_rows"):
        assert one[name] == two[name], name
    assert (two["processes"], two["memory_hosts"], one["memory_hosts"]) == (2, 2, 0)
    assert two["tiers"]["rows_used"] > 0 and not one["tiers"]
    assert two["auc"] == pytest.approx(one["auc"], abs=2e-3)
    assert_close(str(tmp_path / "one"), str(tmp_path / "two"))
    # What they have saved goes on without them.
    more = ["train", "--data", log, "--checkpoint", path, "--resume", "--epochs", 2, *SIZE]
    assert command_line.run(*more).exit_code == 0


@pytest.mark.process
def test_a_killed_row_server_ends_the_run(log: Path, tmp_path: Path) -> None:
    path, said = tmp_path / "run", tmp_path / "said"
    train = ["--data", log, "--checkpoint", path, "--epochs", 50]
    nodes = started(said, 1, [], train)
    try:
        while not complete_in(str(path)):
            assert nodes[0].exitcode is None, told_by(said / "train")
            time.sleep(0.02)
        os.kill(workers_of(nodes[1].pid)[0], signal.SIGKILL)
        nodes[0].join(120)
        assert nodes[0].exitcode == 1
        told = told_by(said / "train")
        assert "Error: Another rank ended" in told and "steps have left them" in told
    finally:
        for node in nodes:
            node.kill()
    more = ["train", "--data", log, "--checkpoint", path, "--resume", "--epochs", 1, *SIZE]
    assert command_line.run(*more).exit_code == 0


@pytest.mark.process
def test_a_row_server_ends_with_a_run_that_cannot_begin(tmp_path: Path) -> None:
    said = tmp_path / "said"
    nodes = started(said, 1, [], ["--data", tmp_path / "none.tsv"])
    for node in nodes:
        node.join(120)
        assert node.exitcode == 1, told_by(said / "hosts")
    assert "does not exist" in told_by(said / "train")
    assert "Error: hotbed train has ended before it told" in told_by(said / "hosts")


@pytest.mark.process
def test_the_example(log: Path, tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "memory_hosts.py"
    arguments = ["--nproc-per-node", "3", "--standalone", str(example), str(log), "1"]
    done = launching.run(torchrun, arguments, tmp_path / "said", environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2,001 samples") == 1
    assert "rows on 1 memory hosts" in done.stdout


def test_it_is_no_command_for_one_process() -> None:
    result = command_line.run("row-server")
    assert result.exit_code == 2
    assert "keeps rows for processes that run hotbed train" in " ".join(result.output.split())
