"""The folder of checkpoints: which is the latest, which go, and what a dead process leaves."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from checkpoint.small_models import with_bias
from torch import nn

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.folder import complete_in, whole_beside
from hotbed.checkpoint.inspect import differences, verified
from hotbed.checkpoint.manifest import read_manifest
from hotbed.data.position import Position


def test_a_save_for_which_there_is_no_room_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs" / "1"
    root.parent.mkdir()
    mkdir = os.mkdir

    def full(path: str, *mode: int) -> None:
        if os.path.basename(path).startswith("step-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *mode)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        hb.save(root, with_bias(1), step=1)
    assert not root.exists() and root.parent.exists()
    root.mkdir()
    with pytest.raises(OSError, match="No space left"):
        hb.save(root, with_bias(1), step=1)
    assert root.exists()  # it is the user's


def bias_in(path: Path) -> float:
    model = with_bias(-1)
    hb.load(path, model)
    bias = float(model["b"].bias.detach())
    assert bool((model["a"].rows("t").values == bias).all())
    return bias


def names_in(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_the_latest_is_read_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (1, 3, 5, 20):
        hb.save(tmp_path, with_bias(step), step=step)
    assert bias_in(tmp_path) == 20
    assert bias_in(tmp_path / "step-000000000003") == 3
    hb.save(tmp_path, with_bias(21), step=20, keep=3)
    assert names_in(tmp_path) == ["step-000000000005", "step-000000000020", "step-000000000020.1"]
    assert bias_in(tmp_path) == 21


def test_what_a_run_saves_that_goes_back_is_the_latest(tmp_path: Path) -> None:
    for step in (1000, 2000, 3000):
        hb.save(tmp_path, with_bias(step), step=step, keep=3)
    for step in (1100, 1200, 1300, 1400, 100, 200):
        saved = hb.save(tmp_path, with_bias(step), step=step, keep=3)
        assert bias_in(tmp_path) == step and hb.checkpoint.latest(tmp_path) == saved.path
    names = ["step-000000000100.2", "step-000000000200.2", "step-000000001400.1"]
    assert names_in(tmp_path) == names


@pytest.mark.parametrize("kind", ["file", "link to nothing", "link to a file"])
def test_what_is_no_folder_is_told(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    for name, to in (("link to nothing", "on_meta"), ("link to a file", "file")):
        (tmp_path / name).symlink_to(to)
    for path in (tmp_path / kind, tmp_path / kind / "run"):
        with pytest.raises(NotADirectoryError):
            hb.save(path, with_bias(0), step=1)
    assert sorted(os.listdir(tmp_path)) == ["file", "link to a file", "link to nothing"]


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    saved = hb.save(tmp_path, with_bias(1), step=1)
    with pytest.raises(CheckpointError, match="is a checkpoint itself. Name the folder"):
        hb.save(saved.path, with_bias(2), step=2)
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        hb.checkpoint.write(saved.path, {})
    assert bias_in(tmp_path) == 1
    assert hb.checkpoint.latest(tmp_path / "none") is None


def test_the_one_that_was_just_written_stays_and_is_the_latest_of_its_step(tmp_path: Path) -> None:
    for value in range(1, 6):
        saved = hb.save(tmp_path, with_bias(value), step=5, keep=1)
        assert Path(saved.path).exists() and bias_in(tmp_path) == value
        assert names_in(tmp_path) == [Path(saved.path).name]
    for step in (1000, 2000, 3000):
        hb.save(tmp_path, with_bias(step), step=step)
    saved = hb.save(tmp_path, with_bias(7), step=100, keep=3)
    assert bias_in(Path(saved.path)) == 7
    names = [Path(p).name[-6:] for p in complete_in(str(tmp_path))]
    assert names == ["2000.4", "3000.4", "0100.5"]


@pytest.mark.parametrize("keep", range(1, 7))
def test_as_many_stay_as_are_to_be_kept(tmp_path: Path, keep: int) -> None:
    for step in range(1, 8):
        hb.save(tmp_path, with_bias(step), step=step, keep=keep)
        kept = [path.name for path in sorted(tmp_path.iterdir())]
        assert kept == [f"step-{n:012}" for n in range(1, step + 1)][-keep:]


def test_steps_of_any_size(tmp_path: Path) -> None:
    for step in (10**12 - 1, 10**12):
        hb.save(tmp_path, with_bias(step % 10), step=step)
        assert bias_in(tmp_path) == step % 10


def test_links_to_checkpoints_are_read(tmp_path: Path) -> None:
    saved = hb.save(tmp_path / "run", with_bias(1), step=1)
    (tmp_path / "latest").symlink_to(saved.path)
    (tmp_path / "run" / "step-000000000009").symlink_to(saved.path)
    assert bias_in(tmp_path / "latest") == bias_in(tmp_path / "run") == 1


def test_what_is_not_a_complete_checkpoint_of_ours_stays(tmp_path: Path) -> None:
    hb.save(tmp_path, with_bias(1), step=1)
    first = tmp_path / "step-000000000001"
    mine = ["checkpoint.json.mine", "dense.safetensors.old", "notes.txt", "rows-0-0.safetensors~"]
    for name in mine:
        (first / name).write_text("mine")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "checkpoint.json").write_text("{}")
    (tmp_path / "readme").write_text("mine")
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    hb.save(elsewhere, with_bias(9), step=9)
    (tmp_path / "step-000000000000").symlink_to(elsewhere / "step-000000000009")
    hb.save(tmp_path, with_bias(2), step=2, keep=1)
    assert names_in(first) == mine
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


def act_before_lock(patch: pytest.MonkeyPatch, kind: int, act: Callable[[], object]) -> None:
    """`act` is called once, right before a lock of that kind is asked for."""
    flock, left = fcntl.flock, [act]

    def lock(descriptor: int, how: int) -> None:
        if how == kind and left:
            left.pop()()
        flock(descriptor, how)

    patch.setattr(fcntl, "flock", lock)


def test_one_that_was_finished_meanwhile_is_not_left_by_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Path(hb.save(tmp_path, with_bias(1), step=1).path)
    new = (first / "checkpoint.json").rename(first / "checkpoint.json.new")
    finish = partial(new.rename, first / "checkpoint.json")
    act_before_lock(monkeypatch, fcntl.LOCK_EX | fcntl.LOCK_NB, finish)
    hb.save(tmp_path, with_bias(2), step=2)
    assert (bias_in(first), bias_in(tmp_path)) == (1, 2)


def test_one_that_went_before_it_was_held_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder stays, as a file of the user's is there."""
    for step in (1, 2):
        last = Path(hb.save(tmp_path, with_bias(step), step=step).path)
    (last / "notes.txt").write_text("mine")
    act_before_lock(monkeypatch, fcntl.LOCK_SH, (last / "checkpoint.json").unlink)
    assert bias_in(tmp_path) == 1


def read(run: Path, during: Callable[[], object]) -> None:
    for _ in hb.checkpoint.read(run, "a.t"):
        during()


def verify(run: Path, during: Callable[[], object]) -> None:
    faults = []
    for _, _, fault in verified(str(run)):
        faults.append(fault)
        during()
    assert faults == [""] * len(faults)


def compare(run: Path, during: Callable[[], object]) -> None:
    for _ in differences(str(run), str(run)):
        during()


def load(run: Path, during: Callable[[], object]) -> None:
    class Loader:
        def load_state_dict(self, _: object) -> None:
            during()

    hb.load(run, with_bias(1), loader=Loader())


@pytest.mark.parametrize("reading", [read, verify, compare, load])
def test_one_that_is_read_is_there_until_it_was_read(
    tmp_path: Path, reading: Callable[[Path, Callable[[], object]], None]
) -> None:
    position = Position()
    hb.save(tmp_path, with_bias(1), step=1, loader=position)
    seen = []

    def save_another() -> None:
        hb.save(tmp_path, with_bias(2), step=2, loader=position, keep=1)
        seen.append(names_in(tmp_path / "step-000000000001"))

    whole = names_in(tmp_path / "step-000000000001")
    reading(tmp_path, save_another)
    assert seen and all(names == whole for names in seen)
    hb.save(tmp_path, with_bias(3), step=3, loader=position, keep=1)
    (left,) = names_in(tmp_path)
    assert left.startswith("step-000000000003")


def test_a_child_that_was_forked_while_one_was_read_does_not_keep_it(tmp_path: Path) -> None:
    """It has copies of what was open, and with them the lock."""
    copies = []

    def copy_folders() -> None:
        for descriptor in range(200):
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    copies.append(os.dup(descriptor))

    hb.save(tmp_path, with_bias(1), step=1, loader=Position())
    load(tmp_path, copy_folders)
    hb.save(tmp_path, with_bias(2), step=2, keep=1)
    assert copies and names_in(tmp_path) == ["step-000000000002"]
    for copy in copies:
        os.close(copy)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is removed there, as somebody may read it."""

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for step in (1, 2):
        hb.save(tmp_path, with_bias(step), step=step, keep=1)
        assert bias_in(tmp_path) == step
    assert names_in(tmp_path) == ["step-000000000001", "step-000000000002"]


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


def test_many_save_and_load_at_once(tmp_path: Path) -> None:
    hb.save(tmp_path, with_bias(0), step=0)
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(hb.save, tmp_path, with_bias(n), step=n, keep=2) for n in range(1, 9)]
        loads = [pool.submit(bias_in, tmp_path) for _ in range(8)]
        for each in saves:
            each.result()
        assert all(each.result() in range(9) for each in loads)
    assert bias_in(tmp_path) in range(1, 9)


def test_where_the_folder_of_a_run_cannot_be_listed_no_other_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr("hotbed.checkpoint.folder.complete_in", refused)
    assert whole_beside(str(tmp_path / "step-000000000001")) == []


def test_a_manifest_says_how_wide_states_are(tmp_path: Path) -> None:
    layer = hb.Embedding(9, 3)
    optimizer = hb.optim.RowwiseAdagrad(layer.parameters(), lr=0.1)
    hb.save(tmp_path / "run", layer, optimizer, step=1)
    (table,) = read_manifest(complete_in(str(tmp_path / "run"))[-1])["tables"].values()
    assert table["rule"]["states"] == [["sum", 1]]
    other = hb.Embedding(9, 3)
    hb.save(tmp_path / "other", other, hb.optim.Adagrad(other.parameters(), lr=0.1), step=1)
    (table,) = read_manifest(complete_in(str(tmp_path / "other"))[-1])["tables"].values()
    assert table["rule"]["states"] == [["sum", 3]]
