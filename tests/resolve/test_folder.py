"""The folder of a storage on SSD: one user at a time, whoever was forked meanwhile, and nothing in it is
deleted or overwritten but Hotbed's own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from resolve.small_logs import small_logs

import hotbed as hb
from hotbed import _core
from hotbed.places.tiered.folder import is_own, logs_in

STORAGE: dict[str, Any] = {"host": "40MB"}


def collection(folder: Path | str, *, reset: bool = False) -> hb.EmbeddingCollection:
    """With a row in its log."""
    storage = hb.Storage(**STORAGE, ssd=folder, reset=reset)
    made = hb.EmbeddingCollection([hb.Table("a", 4)], storage=storage)
    made.assign("a", torch.tensor([1]), torch.ones(1, 4))
    made.flush()
    return made


def run(folder: Path) -> None:
    """A run that has ended."""
    collection(folder)
    gc.collect()


@contextmanager
def forked(work: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A child that does some work and then lives as long as the block."""
    began, begin = os.pipe()
    end, ended = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ended)
            work()
            os.write(begin, b"x")
            os.read(end, 1)
            code = 0
        finally:
            os._exit(code)
    os.close(begin)
    os.close(end)
    try:
        assert os.read(began, 1) == b"x"
        yield
    finally:
        os.close(began)
        os.close(ended)
        assert os.waitpid(child, 0)[1] == 0


# --- Who uses it. ---


def test_a_relative_path_means_the_working_directory_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    storage = hb.Storage(**STORAGE, ssd="rows")
    assert storage.ssd == str(tmp_path / "there" / "rows")
    monkeypatch.chdir(tmp_path / "elsewhere")
    embeddings = hb.EmbeddingCollection([hb.Table("a", 4)], storage=storage)
    embeddings({"a": torch.arange(5)})
    monkeypatch.chdir(tmp_path)
    hb.optim.Adam(embeddings.parameters())
    embeddings({"a": torch.arange(5)})
    embeddings.flush()
    assert not any((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "there" / "rows" / "hottest.json").exists()


def test_a_second_user_in_this_process_is_told_so(tmp_path: Path) -> None:
    first = collection(tmp_path)
    with pytest.raises(hb.StorageError, match="in use by this process") as raised:
        collection(tmp_path)
    assert str(os.getpid()) not in str(raised.value)
    assert first.count() == 1


def test_a_second_process_is_told_who_has_it(tmp_path: Path) -> None:
    first = collection(tmp_path)
    code = f"import hotbed as hb; hb.EmbeddingCollection([hb.Table('a', 4)], \
storage=hb.Storage(host='40MB', ssd={str(tmp_path)!r}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"is in use by process {os.getpid()}." in ran.stderr
    assert first.count() == 1


def test_a_number_that_another_process_left_is_not_this_one(tmp_path: Path) -> None:
    """As in two containers, which both count from 1."""
    import fcntl

    with open(tmp_path / "in-use", "w") as file:
        file.write(f"{os.getpid()}\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(hb.StorageError, match="in use by another process"):
            collection(tmp_path)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_have_no_part_in_it(tmp_path: Path) -> None:
    first = collection(tmp_path)
    with forked():
        del first
        gc.collect()
        again = collection(tmp_path, reset=True)  # free at once
        assert again.count() == 1

        def let_go() -> None:
            nonlocal again
            del again
            gc.collect()

        with forked(let_go):
            with pytest.raises(hb.StorageError, match="in use by this process"):
                collection(tmp_path)
    with pytest.raises(hb.StorageError, match="in use by this process"):
        collection(tmp_path)
    assert again.count() == 1


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_keep_no_file_open(tmp_path: Path) -> None:
    """They would keep the space of every segment that compaction removes."""
    embeddings = collection(tmp_path)
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in fds()}
    assert any(name.endswith(".rows") for name in own)

    def check() -> None:
        for fd in fds():
            assert str(tmp_path) not in os.readlink(f"/proc/self/fd/{fd}")
            assert "io_uring" not in os.readlink(f"/proc/self/fd/{fd}")
        assert "io_uring" not in Path("/proc/self/maps").read_text()

    with forked(check):
        pass
    assert embeddings.count() == 1


def fds() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.islink(f"/proc/self/fd/{name}"):  # not the one of listdir, which is closed
            found.append(int(name))
    return found


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_before_it_waits_for_anything(tmp_path: Path) -> None:
    embeddings = collection(tmp_path)

    def use() -> None:
        with pytest.raises(hb.StorageError, match="from which this one was forked"):
            embeddings({"a": torch.tensor([1])})
        with pytest.raises(hb.StorageError, match="from which this one was forked"):
            embeddings.lookup("a", torch.tensor([1]))

    with forked(use):
        pass


KILLED = """
import os, sys, signal, torch, hotbed as hb
embeddings = hb.EmbeddingCollection([hb.Table("a", 4)], storage=hb.Storage(host="40MB", ssd=sys.argv[1]))
embeddings.assign("a", torch.tensor([1]), torch.ones(1, 4))
embeddings.flush()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_a_killed_parent_frees_it_though_its_children_live(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.wait() == -signal.SIGKILL
        os.kill(child, 0)  # it lives
        assert collection(folder, reset=True).count() == 1
        parent.stdin.close()


# --- What is Hotbed's. ---


def test_reset_deletes_logs_and_nothing_else(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "rows-of-mine").mkdir()
    (tmp_path / "rows-7").mkdir()
    os.rename(tmp_path / "rows-1", tmp_path / "rows-backup")
    run(tmp_path)
    mine = {
        tmp_path / "rows-of-mine" / "data.csv",
        tmp_path / "rows-7" / "data.csv",  # holds no manifest
        tmp_path / "rows-7" / "0-0000000001.rows",
        tmp_path / "notes.txt",
    }
    for path in mine:
        path.write_text("mine")
    with pytest.raises(hb.StorageError, match=r"holds rows of an earlier run \(rows-1\)"):
        collection(tmp_path)
    held = sorted(tmp_path.rglob("*"))
    again = collection(tmp_path, reset=True)
    assert sorted(tmp_path.rglob("*")) == held
    assert all(path.read_text() == "mine" for path in mine)
    assert again.count() == 1 and [log.name for log in logs_in(tmp_path)] == ["rows-1"]


def test_a_refusal_that_is_kept_keeps_not_the_folder(tmp_path: Path) -> None:
    run(tmp_path)
    kept = []
    for _ in range(2):
        with pytest.raises(hb.StorageError, match="holds rows of an earlier run") as raised:
            collection(tmp_path)
        kept.append(raised)  # and its traceback, as a notebook does
    assert collection(tmp_path, reset=True).count() == 1 and len(kept) == 2


def test_what_lies_in_a_log_s_folder_stays_and_is_named(tmp_path: Path) -> None:
    run(tmp_path)
    mine = tmp_path / "rows-1" / "figures" / "loss.csv"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.warns(UserWarning, match=r"rows-1 stays, as it holds .* not Hotbed's: figures\."):
        embeddings = collection(tmp_path, reset=True)
    assert mine.read_text() == "mine" and list(mine.parent.parent.iterdir()) == [mine.parent]
    assert [log.name for log in logs_in(tmp_path)] == ["rows-2"]
    assert embeddings.count() == 1


def test_links_do_not_lead_out(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "rows"
    run(outside)
    kept = sorted(outside.rglob("*"))
    folder.mkdir()
    (folder / "rows-1").symlink_to(outside / "rows-1")
    embeddings = collection(folder, reset=True)
    assert sorted(outside.rglob("*")) == kept and (folder / "rows-1").is_symlink()
    assert [log.name for log in logs_in(folder)] == ["rows-2"]
    del embeddings
    gc.collect()
    segment = next((folder / "rows-2").glob("*.rows"))
    segment.unlink()
    segment.symlink_to(next((outside / "rows-1").glob("*.rows")))
    with pytest.warns(UserWarning, match="rows-2 stays"):
        collection(folder, reset=True)
    assert sorted(outside.rglob("*")) == kept and segment.is_symlink()


@pytest.mark.parametrize("kind", ["file", "link", "folder", "pipe"])
def test_a_file_in_place_of_the_lock_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    place, mine = tmp_path / "in-use", tmp_path / "mine"
    mine.write_text("chapter one")
    if kind == "file":
        os.rename(mine, place)
    elif kind == "link":
        place.symlink_to(mine)
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    with pytest.raises(hb.StorageError, match="in-use"):
        collection(tmp_path, reset=True)
    if kind == "file":
        assert place.read_text() == "chapter one"
    if kind == "link":
        assert mine.read_text() == "chapter one"


def test_a_folder_of_an_earlier_layout_goes_with_its_rows(tmp_path: Path) -> None:
    embeddings = collection(tmp_path)
    hb.optim.Adam(embeddings.parameters())
    assert embeddings.lookup("a", torch.tensor([1])).sum() == 4
    assert [log.name for log in logs_in(tmp_path)] == ["rows-2"]


def test_a_layout_that_found_no_room_leaves_nothing(tmp_path: Path) -> None:
    faults = _core.IoFaults()
    with small_logs(faults):
        embeddings = collection(tmp_path)
    ids = torch.arange(3000)
    embeddings.assign("a", ids, torch.ones(3000, 4))
    hb.optim.Adam(embeddings.parameters())
    faults.full_after_preallocating(0)
    for _ in range(2):
        with pytest.raises(hb.StorageError, match="No space left"):
            embeddings({"a": ids})
        assert [log.name for log in logs_in(tmp_path)] == ["rows-1"]
    faults.make_room()
    assert torch.equal(embeddings.lookup("a", ids), torch.ones(3000, 4))
    assert [log.name for log in logs_in(tmp_path)] == ["rows-4"]
    assert sorted(p.name for p in tmp_path.glob("rows-*")) == ["rows-4"]


def test_a_folder_in_place_of_the_note_is_named(tmp_path: Path) -> None:
    (tmp_path / "hottest.json").mkdir()
    with pytest.raises(hb.StorageError, match=r"hottest\.json cannot be deleted"):
        collection(tmp_path)


def test_names_in_the_folder_that_are_hotbeds() -> None:
    own = ["in-use", "hottest.json", "rows-0", "rows-17"]
    others = ["rows", "rows-", "rows-1.txt", "my-rows-1", "train.tsv", ""]
    assert [name for name in own + others if is_own(name)] == own
