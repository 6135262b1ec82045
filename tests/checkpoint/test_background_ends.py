"""Saves in the background that fail, or whose process, model or thread ends before them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.grown_runs import loaded
from checkpoint.small_models import ROWS, made, train
from checkpoint.test_background import gated

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint import background as background_saves
from hotbed.table.live import live_table


def test_an_error_reaches_wait_and_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(3))
    run = tmp_path / "run"
    kept = hb.save(run, model, optimizer, step=3)

    def fail(*arguments: Any, **more: Any) -> None:
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr("hotbed.checkpoint.rows.write_tensors", fail)
    saving = hb.save(run, model, optimizer, step=4, blocking=False)
    with pytest.raises(OSError, match="the disk is gone"):
        saving.wait()
    assert (
        "gone" in str(saving.error)
        and not live_table(model.embeddings.parameter("user")).core.in_snapshot
    )
    unheard = hb.save(run, model, optimizer, step=5, blocking=False)
    while not unheard.done():
        time.sleep(0.01)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"step 5 in the background has failed.*is gone"):
        hb.save(run, model, optimizer, step=6)
    assert [one.name for one in run.iterdir()] == [Path(kept.path).name]
    hb.save(run, model, optimizer, step=7)
    train(model, optimizer, range(3, 5))


def test_the_next_save_hears_of_an_error_that_is_about_to_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has given its turn away by then."""
    model, optimizer = made("memory", tmp_path, "Adam")
    without_frames = background_saves._without_frames

    def late(error: BaseException) -> BaseException:
        time.sleep(0.3)
        return without_frames(error)

    def fail(*arguments: Any, **more: Any) -> None:
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(background_saves, "_without_frames", late)
    monkeypatch.setattr("hotbed.checkpoint.rows.write_tensors", fail)
    hb.save(tmp_path / "run", model, optimizer, step=1, blocking=False)
    with pytest.raises(CheckpointError, match=r"step 1 in the background has failed"):
        hb.save(tmp_path / "run", model, optimizer, step=2, blocking=False)


KILLED = """
import sys, torch, hotbed as hb
from pathlib import Path
from checkpoint.small_models import made, train
from checkpoint.test_background import gated
run = Path(sys.argv[1])
model, optimizer = made("memory", run.parent, "Adam")
with gated(1) as gate:
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        saving = hb.save(run, model, optimizer, step=step, blocking=False)
        if step < 2:
            gate.let(10_000)
            saving.wait()
            gate._left = type(gate._left)(0)
        else:
            gate.let(int(sys.argv[2]))
            print("now", flush=True)
            import time; time.sleep(60)
"""


@pytest.mark.process
@pytest.mark.parametrize("chunks", [0, 5, 40])
def test_a_kill_leaves_the_one_before(tmp_path: Path, chunks: int) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(run), str(chunks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment()) as process:
        assert process.stdout is not None and process.stdout.readline() == b"now\n"
        time.sleep(0.1)
        process.kill()
    assert [one.step for one in hb.checkpoint.list(run) if one.state == "whole"] == [0, 1]
    model, optimizer = loaded(run, "Adam")
    hb.save(run, model, optimizer, step=2)
    assert len([*run.iterdir()]) == 3  # what the dead process has left is gone


ENDING = """
import sys, hotbed as hb
from pathlib import Path
from checkpoint.small_models import made, train
model, optimizer = made("memory", Path(sys.argv[1]), "Adam")
train(model, optimizer, range(5))
hb.save(Path(sys.argv[1], "run"), model, optimizer, step=5, blocking=False)
"""


@pytest.mark.process
def test_the_end_of_a_process_waits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    subprocess.run(command, check=True, env=_environment())
    assert [one.step for one in hb.checkpoint.list(tmp_path / "run")] == [5]


def _environment() -> dict[str, str]:
    tests = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}


@pytest.mark.process
def test_a_forked_child_saves_and_steps_by_itself(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(3))
    with gated() as gate:
        saving = hb.save(
            tmp_path / "run", model, optimizer, step=3, blocking=False, snapshot_memory=64
        )
        if not (child := os.fork()):
            try:
                torch.set_num_threads(1)
                train(model, optimizer, range(3, 6))
                assert background_saves.turn.last is None
                with pytest.raises(CheckpointError, match="the process that was forked"):
                    saving.wait()
                hb.save(tmp_path / "child", model, optimizer, step=6)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.open()
        saving.wait()
    assert [one.step for one in hb.checkpoint.list(tmp_path / "child")] == [6]
    assert ROWS == len(loaded(tmp_path / "run", "Adam")[0].embeddings.rows("item").ids)


def test_writes_into_the_parameter_are_told(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(3))
    with gated() as gate:
        saving = hb.save(tmp_path / "run", model, optimizer, step=3, blocking=False)
        with torch.no_grad():
            model.embeddings.parameter("item").add_(1)
        gate.open()
        with pytest.raises(CheckpointError, match=r"'item': its parameter was written in place"):
            saving.wait()
    assert not hb.checkpoint.list(tmp_path / "run")
    hb.save(tmp_path / "run", model, optimizer, step=3, blocking=False).wait()


def test_an_interrupt_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that has begun goes on; one that has not is not missed."""
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(3))
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if self.name == "hotbed-save":
            start(self)
            raise KeyboardInterrupt
        start(self)

    def never(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hb.save(tmp_path / "run", model, optimizer, step=3, blocking=False)
    monkeypatch.setattr(threading.Thread, "start", never)
    with pytest.raises(RuntimeError, match="new thread"):
        hb.save(tmp_path / "run", model, optimizer, step=4, blocking=False)
    monkeypatch.undo()
    train(model, optimizer, range(3, 6))
    hb.save(tmp_path / "run", model, optimizer, step=5, blocking=False).wait()
    steps = [one.step for one in hb.checkpoint.list(tmp_path / "run") if one.state == "whole"]
    assert steps in ([3, 5], [5])  # where the first thread came too late to claim its work
    assert not live_table(model.embeddings.parameter("user")).core.in_snapshot


@pytest.mark.parametrize("place", ["memory", "ssd"])
@pytest.mark.parametrize("fails", [False, True])
def test_tables_go_with_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, fails: bool
) -> None:
    model, optimizer = made(place, tmp_path, "Adam")
    train(model, optimizer, range(3))
    table = weakref.ref(live_table(model.embeddings.parameter("user")))

    def fail(*arguments: Any, **more: Any) -> None:
        raise OSError(5, "the disk is gone")

    if fails:
        monkeypatch.setattr("hotbed.checkpoint.rows.write_tensors", fail)
    saving = hb.save(tmp_path / "run", model, optimizer, step=3, blocking=False)
    if fails:
        with pytest.raises(OSError, match="the disk is gone") as raised:
            saving.wait()
        if sys.version_info >= (3, 11):
            assert "write_rows" in "".join(raised.value.__notes__)
        del raised
    else:
        saving.wait()
    del model, optimizer
    gc.collect()
    assert table() is None


UNHEARD = """
import sys, threading, time, atexit, hotbed as hb
from pathlib import Path
from checkpoint.small_models import made, train
from hotbed.checkpoint import begun
model, optimizer = made("memory", Path(sys.argv[1]), "Adam")
run = Path(sys.argv[1], "run")
def late():
    hb.save(run, model, optimizer, step=9, blocking=False)
if sys.argv[2] == "late":
    atexit.register(late)
else:
    begun.write_rows = lambda *a, **b: 1 / 0
    hb.save(run, model, optimizer, step=5, blocking=False)
"""


@pytest.mark.process
def test_what_nobody_has_asked_for_is_told_at_the_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNHEARD, str(tmp_path)]
    failed = subprocess.run([*command, "fail"], env=_environment(), capture_output=True, text=True)
    assert "the save of step 5 in the background has failed: ZeroDivisionError" in failed.stderr
    late = subprocess.run([*command, "late"], env=_environment(), capture_output=True, text=True)
    assert late.returncode == 0, late.stderr
    assert [(one.step, one.state) for one in hb.checkpoint.list(tmp_path / "run")] == [(9, "whole")]
