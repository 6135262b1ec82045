"""A disk that is full is told with the bytes that are missing, and training goes on."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint.disk_calls import FULL, at_call
from checkpoint.small_models import made, train
from checkpoint.whole_checkpoints import names_in

import hotbed as hb

TEXT = re.compile(r"a checkpoint takes up to ([\d,]+) bytes, and ([\d,]+) are free(.*): ")


def numbers_in(error: BaseException) -> tuple[int, int, int]:
    """(bytes of a checkpoint, free, missing)"""
    found = TEXT.search(str(error))
    assert found is not None, error
    missing = re.fullmatch(r"|, so ([\d,]+) are missing", found[3])
    assert missing is not None, error
    return tuple(int((n or "0").replace(",", "")) for n in (found[1], found[2], missing[1]))  # type: ignore[return-value]


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("free", [1000, 10**9])
def test_the_error_tells_how_many_bytes_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, states: bool
) -> None:
    disk = SimpleNamespace(f_bavail=free // 100, f_frsize=100)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    model, optimizer = made("memory", tmp_path, "Adam", untouched="exact")
    train(model, optimizer, range(3))
    takes = hb.save(tmp_path / "whole", model, optimizer, step=3, states=states).bytes
    takes += os.path.getsize(tmp_path / "whole" / "step-000000000003" / "checkpoint.json")
    with (
        pytest.raises(OSError, match="No space left on device: ") as raised,
        at_call(1, FULL, calls=("write",)),
    ):
        hb.save(tmp_path / "run" / "of" / "mine", model, optimizer, step=3, states=states)
    assert raised.value.errno == errno.ENOSPC
    size, told, missing = numbers_in(raised.value)
    assert told == free and missing == max(0, size - free)
    assert 0.8 * takes < size < 1.2 * takes


def test_no_space_for_the_folder_itself(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path)
    with (
        pytest.raises(OSError, match="a checkpoint takes up to") as raised,
        at_call(1, FULL, calls=("mkdir",)),
    ):
        hb.save(tmp_path / "run" / "of" / "mine", model, optimizer, step=0)
    assert raised.value.errno == errno.ENOSPC
    assert names_in(tmp_path) == []


def train_on_a_full_disk(disk: Path) -> None:
    """`disk` is one of a few megabytes."""
    model, optimizer = made("memory", disk, "Adam")
    model.embeddings.assign("user", torch.arange(10_000), torch.zeros(10_000, 3))
    train(model, optimizer, range(1))
    run, filling = disk / "run", disk / "filling"
    first = hb.save(run, model, optimizer, step=1, keep=1)
    free = shutil.disk_usage(disk).free
    filling.write_bytes(bytes(free - first.bytes // 2))
    train(model, optimizer, range(1, 2))
    with pytest.raises(OSError, match="No space left on device: a checkpoint takes") as raised:
        hb.save(run, model, optimizer, step=2, keep=1)
    assert names_in(run) == ["step-000000000001"]
    train(model, optimizer, range(2, 3))
    missing = numbers_in(raised.value)[2]
    assert first.bytes // 3 < missing < first.bytes
    blocks = 5 * os.statvfs(disk).f_frsize  # of 4 files and a header each
    os.truncate(filling, filling.stat().st_size - missing - blocks)
    hb.save(run, model, optimizer, step=3, keep=1)
    assert names_in(run) == ["step-000000000003"]
    losses = train(model, optimizer, range(3, 4))
    other, its_optimizer = made("memory", disk, "Adam")
    hb.load(run, other, its_optimizer)
    assert train(other, its_optimizer, range(3, 4)) == losses


@pytest.mark.process
def test_a_disk_that_is_full_indeed(tmp_path: Path) -> None:
    """In a namespace of its own, where it ends with the process."""
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=4m none "$1" && shift && exec "$@"'
    given = [*mounted, mount, "sh", str(tmp_path)]
    try:
        allowed = subprocess.run([*given, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no command unshare, which a small disk is mounted with")
    if allowed.returncode:
        pytest.skip(f"this machine mounts no small disk: {allowed.stderr.strip()}")
    code = "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; import test_no_room as t"
    here = Path(__file__).parent
    run = f"{code}; t.train_on_a_full_disk(Path(sys.argv[1]))"
    done = subprocess.run(
        [*given, sys.executable, "-c", run, str(tmp_path), str(here), str(here.parent)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
