"""Leases of those who read, write and remove checkpoints on object storage."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.object_stores import contents_of, folders_in, names_in, new_root, put
from checkpoint.small_models import with_bias

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.folder import opened
from hotbed.checkpoint.inspect import verified
from hotbed.checkpoint.new import new_folder, sweep
from hotbed.checkpoint.stores import leases
from hotbed.checkpoint.stores.leases import READING, REMOVING, WRITING, Lease
from hotbed.checkpoint.stores.objects import Objects
from hotbed.checkpoint.stores.remote import RemoteStore

MINUTE, DAY = 60.0, 86400.0
PATIENCE = 30.0


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_root(request.param, tmp_path)


Later = Callable[[float], None]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Lets seconds pass."""
    now = leases.now

    def passed(seconds: float) -> None:
        monkeypatch.setattr(leases, "now", lambda: now() + seconds)

    return passed


def saved(root: str, *steps: int, **options: Any) -> list[str]:
    return [hb.save(root, with_bias(step), step=step, **options).path for step in steps]


def bias_in(path: str) -> float:
    model: Any = with_bias(-1)
    hb.load(path, model)
    return float(model["b"].bias.detach())


def leases_in(path: str) -> list[str]:
    return [name.partition("-")[0] for name in names_in(path) if leases.LEASE.fullmatch(name)]


def steps_in(root: str) -> list[int]:
    return [int(name[len("step-") :]) for name in folders_in(root)]


# -- readers -----------------------------------------------------------------------------------------


def test_what_is_read_stays(root: str) -> None:
    (path,) = saved(root, 1)
    with opened(path):
        assert leases_in(path) == [READING]
        saved(root, 2, 3, keep=1)
        assert steps_in(root) == [1, 3]
        assert [fault for _, _, fault in verified(path) if fault] == []
    assert leases_in(path) == []
    saved(root, 4, keep=1)
    assert steps_in(root) == [4]


def test_rows_that_are_asked_for_one_by_one_stay(root: str) -> None:
    (path,) = saved(root, 1)
    chunks = hb.checkpoint.read(root, "a.t")
    assert len(next(chunks).ids) == 3
    saved(root, 2, keep=1)
    assert steps_in(root) == [1, 2]
    assert [*chunks] == [] and leases_in(path) == []


def test_a_lease_of_a_dead_reader_runs_out(root: str, later: Later) -> None:
    (path,) = saved(root, 1)
    Lease(Objects(root), path, READING).take()
    assert json.loads(contents_of(f"{path}/{names_in(path)[-2]}"))["expires"]
    later(12 * MINUTE)  # it has run out by now, but clocks of machines differ
    saved(root, 2, keep=1)
    assert steps_in(root) == [1, 2]
    later(20 * MINUTE)
    saved(root, 3, keep=1)
    assert steps_in(root) == [3]


def test_a_lease_that_says_nothing_is_one(root: str) -> None:
    (path,) = saved(root, 1)
    lease = f"{path}/{READING}-{'0' * 32}"
    for contents in (b"", b"[]", b'{"expires": 1}', b'{"expires": "x"}', b"\xff"):
        put(lease, contents)
        assert not leases.has_run_out(Objects(root), path, lease.rpartition("/")[2])
    saved(root, 2, keep=1)
    assert steps_in(root) == [1, 2]


def test_a_lease_is_renewed(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = saved(root, 1)
    monkeypatch.setattr(leases, "_RENEWED", 0.001)
    put_at_once, renewed, written = Objects.put, threading.Event(), []

    def note(self: Objects, name: str, contents: bytes) -> None:
        written.append(name)
        if len(written) == 2:
            raise OSError("no connection")  # it is tried again
        put_at_once(self, name, contents)
        if len(written) > 3:
            renewed.set()

    monkeypatch.setattr(Objects, "put", note)
    with opened(path):
        assert renewed.wait(PATIENCE)
        assert leases_in(path) == [READING]
    count = len(written)
    assert leases_in(path) == [] and len(set(written)) == 1
    assert not renewed.wait(0) or len(written) == count  # the thread has ended


def test_one_that_has_run_out_is_not_renewed(
    root: str, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = saved(root, 1)
    lease = Lease(Objects(root), path, READING)
    monkeypatch.setattr(leases, "_RENEWED", 0.001)
    later(-60 * MINUTE)
    lease._write()
    before = lease.expires
    later(0)
    lease._renew()
    assert lease.is_lost and lease.expires == before
    lease.release()
    lease.release()


def test_who_may_not_write_reads_all_the_same(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(root, 1)
    refusal: list[type[Exception]] = [PermissionError]

    def refuse(self: Any, *given: Any, **options: Any) -> None:
        raise refusal[0]("no")

    kind = type(Objects(root)._fs)
    monkeypatch.setattr(kind, "pipe_file", refuse)
    assert bias_in(root) == 1
    refusal[0] = NotImplementedError
    assert bias_in(root) == 1
    refusal[0] = ConnectionError
    with pytest.raises(CheckpointError, match="cannot be read: no"):
        bias_in(root)


# -- those who remove --------------------------------------------------------------------------------


def test_a_reader_that_comes_just_before_it_goes(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look of who removes it and the mark that tells of that."""
    (path,) = saved(root, 1)
    take, reader = Lease.take, opened(path)

    def come_first(self: Lease) -> None:
        if self.name.startswith(REMOVING):
            with monkeypatch.context() as patch:
                patch.setattr(Lease, "take", take)
                assert reader.__enter__() == path
        take(self)

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "take", come_first)
        saved(root, 2, keep=1)
    assert steps_in(root) == [1, 2] and leases_in(path) == [READING]
    assert [fault for _, _, fault in verified(path) if fault] == []
    reader.__exit__(None, None, None)


def test_one_that_holds_changes_of_what_goes(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process completes it just before the mark."""
    model: Any = with_bias(1)
    path = hb.save(root, model, step=1).path
    model["a"].assign("t", [1], torch.ones(1, 2))
    take, changed = Lease.take, []

    def come_first(self: Lease) -> None:
        if self.name.startswith(REMOVING):
            monkeypatch.undo()
            changed.append(hb.save(root, model, step=3, delta=True, base=path))
        take(self)

    monkeypatch.setattr(Lease, "take", come_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of another process
        saved(root, 2, keep=1)
    assert steps_in(root) == [1, 2, 3] and changed[0].base == path
    assert [fault for _, _, fault in verified(changed[0].path) if fault] == []


def test_a_reader_that_comes_when_it_is_going(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the mark: it reads another."""
    (path,) = saved(root, 1)
    take, told = Lease.take, []

    def come_then(self: Lease) -> None:
        take(self)
        if self.name.startswith(REMOVING):
            with monkeypatch.context() as patch:
                patch.setattr(Lease, "take", take)
                told.append(bias_in(root))
                with pytest.raises(CheckpointError, match="There is no checkpoint"):
                    bias_in(path)

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "take", come_then)
        saved(root, 2, keep=1)
    assert told == [2] and steps_in(root) == [2]


def test_one_that_is_going_where_another_has_come_meanwhile(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = saved(root, 1)
    folders = RemoteStore.folders_in

    def before(self: RemoteStore, folder: str) -> list[str]:
        found = folders(self, folder)
        monkeypatch.undo()
        saved(root, 2)
        put(f"{path}/{REMOVING}-{'0' * 32}", b"")
        return found

    monkeypatch.setattr(RemoteStore, "folders_in", before)
    assert str(hb.checkpoint.latest(root)).endswith("2")


@pytest.mark.filterwarnings("ignore:Another process saves")
@pytest.mark.parametrize("removed", [0, 1, 2])
def test_what_a_dead_process_has_not_removed_yet(
    root: str, later: Later, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    (path,) = saved(root, 1)
    remove, left = Objects.remove, [removed]

    def die(self: Objects, name: str) -> None:
        if left[0] == 0:
            raise SystemExit
        left[0] -= name.startswith(path)
        remove(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "remove", die)
        patch.setattr(Lease, "release", lambda self: self._ended.set())
        with pytest.raises(SystemExit):
            saved(root, 2, keep=1)
    assert leases_in(path) == [REMOVING]
    assert hb.checkpoint.list(root)[0].state == "incomplete" and bias_in(root) == 2
    saved(root, 3)
    assert 1 in steps_in(root)
    later(20 * MINUTE)
    saved(root, 4)
    assert steps_in(root) == [2, 3, 4]


# -- writers -----------------------------------------------------------------------------------------


def test_a_dead_writer_is_swept_when_its_lease_has_run_out(root: str, later: Later) -> None:
    saved(root, 1)
    path = f"{root}/step-000000000002"
    put(f"{path}/dense.safetensors", b"half")
    Lease(Objects(root), path, WRITING).take()
    assert hb.checkpoint.list(root)[-1].state == "being written"
    saved(root, 3)
    later(12 * MINUTE)
    saved(root, 4)
    assert steps_in(root) == [1, 2, 3, 4]
    later(16 * MINUTE)
    assert hb.checkpoint.list(root)[1].state == "incomplete"
    saved(root, 5)
    assert steps_in(root) == [1, 3, 4, 5]


def test_one_that_is_complete_when_its_lease_is_looked_at_stays(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sweeps has listed the folder before the manifest was there."""
    contents = Objects.contents
    with new_folder(root, 1) as new:

        def late(self: Objects, path: str, *place: Any) -> bytes:
            if f"/{WRITING}-" in path:
                monkeypatch.undo()
                new.complete({"step": 1})
            return contents(self, path, *place)

        put(f"{new.path}/dense.safetensors", b"half")
        monkeypatch.setattr(Objects, "contents", late)
        sweep(root)
    assert names_in(new.path) == ["checkpoint.json", "dense.safetensors"]


def test_what_has_no_lease_is_swept_after_a_day(root: str, later: Later) -> None:
    saved(root, 1)
    put(f"{root}/step-000000000002/dense.safetensors", b"half")
    later(DAY - MINUTE)
    saved(root, 3)
    assert steps_in(root) == [1, 2, 3]
    later(DAY + MINUTE)
    saved(root, 4)
    assert steps_in(root) == [1, 3, 4]


def test_a_writer_that_was_taken_for_dead_fails(root: str, later: Later) -> None:
    with (
        pytest.raises(CheckpointError, match="the lease of this save has run out"),
        new_folder(root, 1) as new,
    ):
        put(f"{new.path}/dense.safetensors", b"half")
        later(20 * MINUTE)
        saved(root, 2)
        assert steps_in(root) == [2]
        new.complete({"step": 1})
    assert steps_in(root) == [2] and bias_in(root) == 2


def test_one_whose_name_is_taken_meanwhile_leaves_the_other_alone(root: str, later: Later) -> None:
    with (
        pytest.raises(CheckpointError, match="the lease of this save has run out"),
        new_folder(root, 2) as new,
    ):
        later(20 * MINUTE)
        (path,) = saved(root, 2)
        assert path == new.path
        before = names_in(path)
        new.complete({"step": 2})
    assert names_in(path) == before and bias_in(root) == 2


def test_one_whose_name_is_being_taken_leaves_the_other_alone(root: str, later: Later) -> None:
    with new_folder(root, 2) as first:
        pass
    with new_folder(root, 2) as second:
        assert second.path == first.path
        with pytest.raises(CheckpointError, match="the lease of this save has run out"):
            first.complete({"step": 2})
        put(f"{second.path}/dense.safetensors", b"half")
        second.complete({"step": 2})
    assert names_in(second.path) == ["checkpoint.json", "dense.safetensors"]


@pytest.mark.parametrize("fails", [False, True])
def test_one_that_wants_the_same_name_for_a_moment(root: str, fails: bool) -> None:
    """It goes when it sees that the name is taken."""
    with contextlib.suppress(RuntimeError), new_folder(root, 1) as new:
        other = Lease(Objects(root), new.path, WRITING)
        other.take()
        put(f"{new.path}/dense.safetensors", b"half")
        if fails:
            raise RuntimeError
        new.complete({"step": 1})
    assert leases_in(new.path) == [WRITING]
    other.release()
    left = [] if fails else ["checkpoint.json", "dense.safetensors"]
    assert names_in(root) == [f"step-000000000001/{name}" for name in left]


def test_a_reader_of_what_was_removed_does_not_keep_the_name(root: str) -> None:
    reader = Lease(Objects(root), f"{root}/step-000000000001", READING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteStore, "folders_in", lambda self, root: [])
        reader.take()
        with new_folder(root, 1) as new:
            assert new.path.endswith("step-000000000001")
    reader.release()


def test_a_storage_that_lists_late_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objects, "entries", lambda self, folder: [])
    with pytest.raises(CheckpointError, match="does not list what was just written there"):
        saved(root, 1)


def test_without_threads(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process ends."""

    def none(self: threading.Thread) -> None:
        raise RuntimeError("cannot start new thread at interpreter shutdown")

    saved(root, 1)
    lease = Lease(Objects(root), f"{root}/step-000000000001", READING)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        lease.take()
    assert leases_in(f"{root}/step-000000000001") == [READING]
    lease.release()
    assert leases_in(f"{root}/step-000000000001") == []
