"""Folders by URL on a file system, where other saves begin and end between the steps of a call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")
from checkpoint.small_models import with_bias

import hotbed as hb
from hotbed.checkpoint.names import MANIFEST
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.stores.leases import WRITING, Lease
from hotbed.checkpoint.stores.objects import Objects
from hotbed.checkpoint.stores.remote import RemoteStore


def test_a_folder_that_goes_before_its_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/run"
    store = store_of(url)
    assert isinstance(store, RemoteStore)
    system: Any = store.objects._fs
    write, lost = system.pipe_file, ["once", "twice"]

    def gone(path: str, contents: bytes, **how: Any) -> Any:
        if lost:
            lost.pop()
            raise FileNotFoundError(2, "No such file or directory", path)
        return write(path, contents, **how)

    monkeypatch.setattr(system, "pipe_file", gone)
    hb.save(url, with_bias(1), step=1)
    assert not lost and [each.state for each in hb.checkpoint.list(url)] == ["whole"]


def test_a_lease_that_comes_behind_a_listing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "step-000000000001"
    folder.mkdir(parents=True)  # whoever made it writes its lease next
    store = store_of(f"file://{folder}")
    assert isinstance(store, RemoteStore)
    lease, entries = Lease(store.objects, f"file://{folder}", WRITING), Objects.entries

    def late(self: Objects, of: str) -> Any:
        found = entries(self, of)
        if not found:
            lease.take()
        return found

    monkeypatch.setattr(Objects, "entries", late)
    try:
        store.remove_left_over(f"file://{folder}")
        assert os.listdir(folder) == [lease.name]
    finally:
        lease.release()


def test_no_part_of_a_manifest_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/run"
    hb.save(url, with_bias(1), step=1)
    put = Objects.put

    def half(self: Objects, path: str, contents: bytes) -> None:
        if MANIFEST not in path:
            return put(self, path, contents)
        put(self, path, contents[: len(contents) // 2])
        states = [each.state for each in hb.checkpoint.list(url)]
        assert states == ["whole", "being written"]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Objects, "put", half)
    with pytest.raises(OSError, match="No space left"):
        hb.save(url, with_bias(2), step=2)
    monkeypatch.undo()
    hb.save(url, with_bias(3), step=3)
    assert [each.state for each in hb.checkpoint.list(url)] == ["whole", "whole"]
