"""Two runs that save into one folder: the checkpoint that was completed last stays, and users are warned."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint.small_models import with_bias
from checkpoint.whole_checkpoints import check_whole, names_in

import hotbed as hb
from hotbed.checkpoint import begun
from hotbed.checkpoint import new as new_checkpoints
from hotbed.checkpoint.folder import complete_in
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.stores import local, local_files
from hotbed.checkpoint.tensors import write_tensors
from hotbed.train import saved
from hotbed.train.saved import save_model

ROUNDS = 20
PATIENCE = 60
"""Seconds after which a thread counts as stuck."""


def bias_in(path: str | Path) -> float:
    model = with_bias(-1)
    hb.load(path, model)
    return float(model["b"].bias.detach())


def while_written(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """`act` is called once, when rows of the next checkpoint are there and its manifest is not."""
    write, left = write_tensors, [act]

    def write_after(path: str, tensors: Any) -> Any:
        if left:
            left.pop()()
        return write(path, tensors)

    patch.setattr(begun, "write_tensors", write_after)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_latest_is_the_one_that_was_completed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    hb.save(tmp_path, with_bias(0), step=1)
    while_written(monkeypatch, lambda: hb.save(tmp_path, with_bias(3), step=3, keep=keep))
    last = hb.save(tmp_path, with_bias(5), step=5, keep=keep)
    assert hb.checkpoint.latest(tmp_path) == last.path and bias_in(tmp_path) == 5
    assert len(complete_in(str(tmp_path))) == keep
    check_whole(tmp_path)
    assert len(names_in(tmp_path)) == keep


def test_a_checkpoint_is_complete_and_earlier_ones_gone_before_another_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run saves, as far as it gets, between the manifest of the first and the end of earlier ones."""
    goes_on, paths = threading.Event(), {}
    replace, flock = os.replace, fcntl.flock

    def save_other() -> None:
        paths["other"] = hb.save(tmp_path, with_bias(2), step=2, keep=1).path
        goes_on.set()

    other = threading.Thread(target=save_other)

    def replaced(path: str, to: str) -> None:
        replace(path, to)
        if threading.current_thread() is not other:
            other.start()
            assert goes_on.wait(PATIENCE)

    def lock(descriptor: int, how: int) -> None:
        waits = how == fcntl.LOCK_EX and os.fstat(descriptor).st_ino == tmp_path.stat().st_ino
        if waits and threading.current_thread() is other:
            goes_on.set()
        flock(descriptor, how)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(fcntl, "flock", lock)
    paths["first"] = hb.save(tmp_path, with_bias(1), step=1, keep=1).path
    other.join(PATIENCE)
    assert [*map(str, tmp_path.iterdir())] == [paths["other"]]
    assert bias_in(tmp_path) == 2


SAVING = """
import sys
from test_shared_folders import with_bias
import hotbed as hb

model = with_bias(float(sys.argv[2]))
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    path = f"{sys.argv[1]}/{number}"
    for step in range(3):
        saved = hb.save(path, model, step=step, keep=1)
    print(saved.path, flush=True)
"""


@pytest.mark.process
def test_two_processes_that_keep_one_leave_one(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = {[str(here), str(here.parent)]!r}\n{SAVING}"
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), str(value)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for value in (1, 2)
    ]
    try:
        assert [one.stdout.readline() for one in both if one.stdout] == ["ready\n"] * 2
        for number in range(ROUNDS):
            for one in both:
                assert one.stdin is not None
                one.stdin.write("\n")
                one.stdin.flush()
            paths = [one.stdout.readline().strip() for one in both if one.stdout]
            (left,) = complete_in(str(tmp_path / str(number)))
            assert left in paths and bias_in(left) == 1 + paths.index(left)
    finally:
        for one in both:
            one.communicate(timeout=PATIENCE)
    assert [one.returncode for one in both] == [0, 0]


@pytest.fixture
def four(tmp_path: Path) -> list[Path]:
    """Checkpoints of steps 1 to 4, of which the second lacks a file, and the last two are damaged."""
    paths = [Path(hb.save(tmp_path, with_bias(n), step=n).path) for n in range(1, 5)]
    (paths[1] / "rows-0-0.safetensors").unlink()
    os.truncate(paths[2] / "rows-0-0.safetensors", 5)
    contents = bytearray((paths[3] / "checkpoint.json").read_bytes())
    contents[len(contents) // 2] ^= 1
    (paths[3] / "checkpoint.json").write_bytes(contents)
    return paths


def test_damaged_ones_do_not_count_as_kept(
    tmp_path: Path, four: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = [], os.open

    def opened(path: Any, *given: Any, **options: Any) -> int:
        read.append(Path(path))
        return real(path, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        hb.save(tmp_path, with_bias(5), step=5, keep=2)
    assert bias_in(four[0]) == 1 and bias_in(tmp_path) == 5
    assert not [path for path in read if path.parent in four and path.suffix == ".safetensors"]
    hb.save(tmp_path, with_bias(6), step=6, keep=2)
    assert names_in(tmp_path) == ["step-000000000005", "step-000000000006"]


def test_one_that_is_not_whole_itself_removes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system of the network that has lost a file of another rank."""
    hb.save(tmp_path, with_bias(1), step=1)
    replace = os.replace

    def lose(path: str, to: str) -> None:
        os.unlink(Path(to).parent / "rows-0-0.safetensors")
        replace(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lose)
        hb.save(tmp_path, with_bias(2), step=2, keep=1)
    assert bias_in(tmp_path / "step-000000000001") == 1


# -- that somebody is told ---------------------------------------------------------------------------


def by_another_process(patch: pytest.MonkeyPatch, *given: Any, **options: Any) -> str:
    """A save that this process takes for another's."""
    with patch.context() as context:
        context.setattr("hotbed.checkpoint.new._last_seen", {})
        return hb.save(*given, **options).path


def test_a_run_is_warned_whose_folder_another_saves_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_another_process(monkeypatch, tmp_path, with_bias(1), step=1)  # which this run goes on from
    hb.save(tmp_path, with_bias(2), step=2, keep=2)
    by_another_process(monkeypatch, tmp_path, with_bias(3), step=3, keep=2)
    with pytest.warns(UserWarning, match="Another process saves checkpoints into .* of its own"):
        hb.save(tmp_path, with_bias(4), step=4, keep=2)
    hb.save(tmp_path, with_bias(5), step=5, keep=2)


def test_a_run_is_warned_if_another_saves_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_other() -> None:
        by_another_process(monkeypatch, tmp_path, with_bias(2), step=2, keep=1)

    while_written(monkeypatch, save_other)
    with pytest.warns(UserWarning, match="Another process saves checkpoints into"):
        last = hb.save(tmp_path, with_bias(1), step=1, keep=1)
    assert [*map(str, tmp_path.iterdir())] == [last.path] and bias_in(tmp_path) == 1


def test_save_passes_over_what_another_run_has_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(str(tmp_path), with_bias(1), None, 1)
    read = read_manifest

    def replaced(folder: str) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(saved, "read_manifest", read)
            save_model(str(tmp_path), with_bias(2), None, 2)
        return read(folder)

    monkeypatch.setattr(saved, "read_manifest", replaced)
    saved.check_writable_folder(str(tmp_path))
    assert bias_in(tmp_path) == 2


def test_one_that_fails_when_it_was_renamed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = []
    while_written(monkeypatch, lambda: other.append(hb.save(tmp_path, with_bias(2), step=1).path))

    def fail(path: str, to: str) -> None:
        if other:
            raise OSError("broken")
        replace(path, to)

    replace = os.replace
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="broken"):
        hb.save(tmp_path, with_bias(1), step=3, keep=1)
    assert [*map(str, tmp_path.iterdir())] == other


def test_one_that_takes_another_name_is_not_taken_for_what_a_dead_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between `os.mkdir` and `os.rename` nobody holds the folder of the new name."""
    remove, mkdir, renames, flock = local_files.remove_own, os.mkdir, os.rename, fcntl.flock
    found, removing, renamed = threading.Event(), threading.Event(), threading.Event()
    sweeping = threading.Thread(target=new_checkpoints.sweep, args=(str(tmp_path),))

    def sweep_then(path: str, *mode: int) -> None:
        mkdir(path, *mode)
        if path.endswith(".1"):
            sweeping.start()
            assert found.wait(PATIENCE)

    def rename(path: str, to: str) -> None:
        renames(path, to)
        renamed.set()
        if removing.is_set():
            sweeping.join(PATIENCE)

    def remove_when_renamed(folder: str) -> None:
        removing.set()
        found.set()
        assert renamed.wait(PATIENCE)
        remove(folder)

    def lock(descriptor: int, how: int) -> None:
        if threading.current_thread() is sweeping and how == fcntl.LOCK_EX:
            found.set()
        flock(descriptor, how)

    with new_checkpoints.new_folder(str(tmp_path), 1) as new:
        hb.save(tmp_path, with_bias(2), step=2)
        write_tensors(os.path.join(new.path, "dense.safetensors"), {})
        monkeypatch.setattr(os, "mkdir", sweep_then)
        monkeypatch.setattr(fcntl, "flock", lock)
        monkeypatch.setattr(local, "remove_own", remove_when_renamed)
        monkeypatch.setattr(os, "rename", rename)
        new.complete({"step": 1})
    sweeping.join(PATIENCE)
    assert sorted(os.listdir(new.path)) == ["checkpoint.json", "dense.safetensors"]


def test_one_that_is_complete_can_be_removed_before_its_process_goes_on(tmp_path: Path) -> None:
    with new_checkpoints.new_folder(str(tmp_path), 1) as new:
        new.complete({"step": 1})
        saved = hb.save(tmp_path, with_bias(2), step=2, keep=1)
        assert [*map(str, tmp_path.iterdir())] == [saved.path]
