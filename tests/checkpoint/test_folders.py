"""The folder of checkpoints: which is the latest, which go, and what a dead process leaves."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.folder import complete_in


def with_bias(value: float) -> nn.Module:
    model = nn.ModuleDict(
        {"a": hb.EmbeddingCollection([hb.Table("t", 2)], seed=0), "b": nn.Linear(1, 1)}
    )
    model["a"].assign("t", [1, 2, 3], torch.full((3, 2), value))
    with torch.no_grad():
        model["b"].bias.fill_(value)
    return model


def bias_in(path: Path) -> float:
    model = with_bias(-1)
    hb.load(path, model)
    bias = float(model["b"].bias.detach())
    assert bool((model["a"].rows("t").values == bias).all())
    return bias


def names_in(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_the_latest_is_read_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (1, 5, 3, 20):
        hb.save(tmp_path, with_bias(step), step=step)
    assert bias_in(tmp_path) == 20
    assert bias_in(tmp_path / "step-000000000003") == 3
    hb.save(tmp_path, with_bias(21), step=20, keep=3)
    assert names_in(tmp_path) == ["step-000000000005", "step-000000000020", "step-000000000020.1"]
    assert bias_in(tmp_path) == 21


def test_the_one_that_was_just_written_stays_and_is_the_latest_of_its_step(tmp_path: Path) -> None:
    for value in range(1, 6):
        saved = hb.save(tmp_path, with_bias(value), step=5, keep=1)
        assert Path(saved.path).exists() and bias_in(tmp_path) == value
        assert names_in(tmp_path) == [Path(saved.path).name]
    for step in (1000, 2000, 3000):
        hb.save(tmp_path, with_bias(step), step=step)
    saved = hb.save(tmp_path, with_bias(7), step=100, keep=3)
    assert bias_in(Path(saved.path)) == 7
    assert [Path(p).name[-4:] for p in complete_in(str(tmp_path))] == ["0100", "2000", "3000"]


def test_links_to_checkpoints_are_read(tmp_path: Path) -> None:
    saved = hb.save(tmp_path / "run", with_bias(1), step=1)
    (tmp_path / "latest").symlink_to(saved.path)
    (tmp_path / "run" / "step-000000000009").symlink_to(saved.path)
    assert bias_in(tmp_path / "latest") == bias_in(tmp_path / "run") == 1


def test_what_is_not_a_complete_checkpoint_of_ours_stays(tmp_path: Path) -> None:
    hb.save(tmp_path, with_bias(1), step=1)
    first = tmp_path / "step-000000000001"
    (first / "notes.txt").write_text("mine")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "checkpoint.json").write_text("{}")
    (tmp_path / "readme").write_text("mine")
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    hb.save(elsewhere, with_bias(9), step=9)
    (tmp_path / "step-000000000000").symlink_to(elsewhere / "step-000000000009")
    hb.save(tmp_path, with_bias(2), step=2, keep=1)
    assert names_in(first) == ["notes.txt"]
    assert names_in(tmp_path / "step-2") == ["checkpoint.json"]
    assert bias_in(elsewhere) == 9
    assert bias_in(tmp_path) == 2


def test_one_that_is_read_stays_for_now(tmp_path: Path) -> None:
    hb.save(tmp_path, with_bias(1), step=1)
    read = os.open(tmp_path / "step-000000000001", os.O_RDONLY)
    fcntl.flock(read, fcntl.LOCK_SH)
    hb.save(tmp_path, with_bias(2), step=2, keep=1)
    assert len(complete_in(str(tmp_path))) == 2
    os.close(read)
    hb.save(tmp_path, with_bias(3), step=3, keep=1)
    assert len(complete_in(str(tmp_path))) == 1


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        hb.load(tmp_path, nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="no folder"):
        hb.load(tmp_path / "none", nn.Linear(1, 1))


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    hb.save(tmp_path, with_bias(1), step=1)

    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"when": {"function": print}}

    with pytest.raises(CheckpointError, match=r"loaders.0.when.function is of type builtin"):
        hb.save(tmp_path, with_bias(2), step=2, loader=Odd())
    assert names_in(tmp_path) == ["step-000000000001"]


KILLED = """
import os, sys
sys.path[:0] = [sys.argv[2]]
import hotbed as hb
from test_folders import with_bias
first, second = with_bias(1), with_bias(2)
ended = at = 0
while not ended:
    at += 1
    path = f"{sys.argv[1]}/k{at}"
    hb.save(path, first, step=1)
    child = os.fork()
    if not child:
        calls = 0
        def counted(function):
            def call(*args, **options):
                global calls
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), 9)
                return function(*args, **options)
            return call
        for name in ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "close", "listdir"):
            setattr(os, name, counted(getattr(os, name)))
        hb.save(path, second, step=2, keep=1)
        os._exit(0)
    ended = os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.process
def test_a_process_killed_at_any_call_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here], check=True)
    found = []
    for path in sorted(tmp_path.iterdir(), key=lambda path: int(path.name[1:])):
        found.append(bias_in(path))
        hb.save(path, with_bias(3), step=3, keep=1)
        assert bias_in(path) == 3
        assert names_in(path) == ["step-000000000003"]
    assert len(found) > 15 and set(found) == {1, 2} and found == sorted(found)


def test_many_save_and_load_at_once(tmp_path: Path) -> None:
    hb.save(tmp_path, with_bias(0), step=0)
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(hb.save, tmp_path, with_bias(n), step=n, keep=2) for n in range(1, 9)]
        loads = [pool.submit(bias_in, tmp_path) for _ in range(8)]
        for each in saves:
            each.result()
        assert all(each.result() in range(9) for each in loads)
    assert bias_in(tmp_path) == 8
