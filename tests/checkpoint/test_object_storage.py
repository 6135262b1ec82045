"""Checkpoints on object storage: the same as in folders, but for links."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint.object_stores import (
    BUCKET,
    KINDS,
    contents_of,
    environment_of,
    folders_in,
    names_in,
    new_root,
    put,
    s3_server,
    storage_of,
)
from checkpoint.small_models import everything, made, same, train, with_bias
from cli.command_line import run as hotbed
from dist.worlds import run as on_ranks
from typer.testing import Result

import hotbed as hb
from hotbed.checkpoint import CheckpointError, DamagedError, rows, tensors
from hotbed.checkpoint.folder import complete_in
from hotbed.checkpoint.inspect import differences, verified
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.merge_columns import whole_rows
from hotbed.checkpoint.new import new_folder
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.stores.objects import Objects
from hotbed.checkpoint.stores.remote import RemoteStore
from hotbed.data import write_criteo_tsv

ITEM = "embeddings.item"


@pytest.fixture(scope="session")  # as connections of a process last as long
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("endpoint")
    return new_root(request.param, tmp_path)


@pytest.fixture
def s3_root(endpoint: str, tmp_path: Path) -> str:
    return new_root("s3", tmp_path)


def bias_in(path: str) -> float:
    model: Any = with_bias(-1)
    hb.load(path, model)
    value = float(model["b"].bias.detach())
    assert float(model["a"].lookup("t", torch.tensor([2]))[0, 0]) == value
    return value


def check_whole(root: str) -> None:
    for path in complete_in(root):
        assert [fault for _, _, fault in verified(path) if fault] == []


def test_training_goes_on_with_the_same_bits(root: str, tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    train(model, optimizer, range(2))
    saved = hb.save(root, model, optimizer, step=2)
    losses = train(model, optimizer, range(2, 4))
    assert folders_in(root) == ["step-000000000002"]
    assert names_in(saved.path) == [
        "checkpoint.json",
        "dense.safetensors",
        "rows-0-0.safetensors",
    ]
    other, of_other = made("memory", tmp_path, "Adam")
    restored = hb.load(root, other, of_other)
    assert restored.path == saved.path and restored.step == 2
    assert train(other, of_other, range(2, 4)) == losses
    assert same(everything(other, of_other), everything(model, optimizer))
    check_whole(root)


def test_files_are_those_of_a_folder(root: str, tmp_path: Path) -> None:
    """But for the manifest, which has a number of its own."""
    model, optimizer = made("memory", tmp_path)
    train(model, optimizer, range(2))
    here = Path(hb.save(tmp_path / "run", model, optimizer, step=2).path)
    there = hb.save(root, model, optimizer, step=2).path
    for file in here.iterdir():
        contents = contents_of(f"{there}/{file.name}")
        assert len(contents) == file.stat().st_size
        assert contents == file.read_bytes() or file.name == "checkpoint.json"
    assert all(one[1:4] == (0, 0, 0) for one in differences(str(here), there))


def test_what_has_changed(root: str, tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path)
    train(model, optimizer, range(1))
    whole = hb.save(root, model, optimizer, step=1)
    train(model, optimizer, range(1, 2))
    changed = hb.save(root, model, optimizer, step=2, delta=True, keep=1)
    assert changed.base == whole.path and changed.rows < whole.rows
    assert len(folders_in(root)) == 2  # as the base is needed
    other, of_other = made("memory", tmp_path)
    assert hb.load(root, other, of_other).step == 2
    assert same(everything(other, of_other), everything(model, optimizer))

    found = hb.checkpoint.changes(root, ITEM, since=1)
    ids = [row for some in found for row in some.ids.tolist()]
    assert 0 < len(ids) < whole.rows and len(ids) == len(set(ids)) and not len(found.erased)
    hb.save(root, model, optimizer, step=3, delta=True, base=changed.path)
    merged = hb.checkpoint.merge(root, f"{root}-merged")
    assert all(one[1:4] == (0, 0, 0) for one in differences(merged, root))
    assert hb.checkpoint.list(f"{root}-merged")[0].base is None
    check_whole(root)
    hb.save(root, model, optimizer, step=4, keep=1)
    assert folders_in(root) == ["step-000000000004"]


def test_while_it_trains(root: str, tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path)
    train(model, optimizer, range(1))
    before = copy.deepcopy(everything(model, optimizer))
    saving = hb.save(root, model, optimizer, step=1, blocking=False)
    train(model, optimizer, range(1, 3))
    saved = saving.wait()
    other, of_other = made("memory", tmp_path)
    hb.load(saved.path, other, of_other)
    assert same(everything(other, of_other), before)
    assert not [name for name in names_in(root) if "writing" in name]


def test_lists(root: str) -> None:
    assert hb.checkpoint.latest(root) is None and not hb.checkpoint.list(root)
    began = time.time() - 2
    paths = [hb.save(root, with_bias(step), step=step).path for step in (1, 5, 3)]
    found = hb.checkpoint.list(root)
    assert [one.path for one in found] == paths and hb.checkpoint.latest(root) == paths[-1]
    assert [(one.step, one.state) for one in found] == [(1, "whole"), (5, "whole"), (3, "whole")]
    assert paths[-1].endswith("step-000000000003.1")  # as step 5 was there already
    sizes = [storage_of(root).size(f"{paths[0]}/{n}") for n in names_in(paths[0])]
    manifest = storage_of(root).size(f"{paths[0]}/checkpoint.json")
    assert found[0].bytes == sum(sizes) - manifest
    assert began < found[0].when.timestamp() < time.time() + 2
    assert [one.path for one in hb.checkpoint.list(paths[1])] == [paths[1]]
    assert bias_in(paths[1]) == 5 and bias_in(f"{root}/") == 3


def test_the_last_stay(root: str) -> None:
    for step in range(4):
        hb.save(root, with_bias(step), step=step, keep=2)
    assert folders_in(root) == ["step-000000000002", "step-000000000003"]
    mine = f"{root}/step-000000000002/mine.txt"
    put(mine, b"mine")
    hb.save(root, with_bias(9), step=9, keep=1)
    assert names_in(f"{root}/step-000000000002") == ["mine.txt"] and bias_in(root) == 9
    hb.save(root, with_bias(10), step=10, keep=1)  # beside a folder that stays
    assert contents_of(mine) == b"mine"


def test_single_tables(root: str) -> None:
    ids, weights = torch.arange(100), torch.randn(100, 16)
    hb.checkpoint.write(root, {"t": [(ids[:50], weights[:50]), (ids[50:], weights[50:])]})
    (chunk,) = hb.checkpoint.read(root, "t")
    assert torch.equal(chunk.ids, ids) and torch.equal(chunk.weights, weights)
    assert hb.checkpoint.contains(root, "t", [3, 100, -1]).tolist() == [True, False, False]
    with pytest.raises(CheckpointError, match="has no table 'u'. It has t."):
        hb.checkpoint.contains(root, "u", [3])


def test_a_model_of_the_zoo(root: str) -> None:
    model = hb.models.DLRM(["user", "item"], dim=4)
    batch = {"dense": torch.rand(2, 13), "user": torch.tensor([1, 7]), "item": torch.tensor([3, 3])}
    model(batch)
    hb.save(root, model.eval(), step=1)
    assert torch.equal(hb.checkpoint.load_model(root)(batch), model(batch))


# -- what is wrong -----------------------------------------------------------------------------------


def test_damage_is_found(root: str) -> None:
    first = hb.save(root, with_bias(1), step=1).path
    second = hb.save(root, with_bias(2), step=2).path
    path = f"{second}/rows-0-0.safetensors"
    whole = contents_of(path)
    put(path, whole[:-1])
    assert [one.state for one in hb.checkpoint.list(root)] == ["whole", "damaged"]
    with pytest.raises(
        DamagedError, match=r"was saved with .* Whole .* step-000000000001"
    ) as raised:
        bias_in(root)
    assert raised.value.others == [first]
    put(path, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedError, match=r"is damaged: bytes 0 to"):
        bias_in(root)
    storage_of(root).rm_file(path)
    with pytest.raises(DamagedError, match=r"rows-0-0.safetensors is missing"):
        bias_in(root)
    put(f"{second}/checkpoint.json", contents_of(f"{second}/checkpoint.json")[:-20])
    with pytest.raises(DamagedError, match=r"checkpoint.json is no manifest"):
        bias_in(root)
    hb.save(root, with_bias(3), step=3, keep=2)  # of which only whole ones count
    assert len(folders_in(root)) == 3
    hb.save(root, with_bias(4), step=4, keep=2)
    assert folders_in(root) == ["step-000000000003", "step-000000000004"]


def test_there_is_none(root: str) -> None:
    with pytest.raises(CheckpointError, match="There is no folder"):
        bias_in(root)
    put(f"{root}/mine.txt", b"mine")
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        bias_in(root)
    path = hb.save(root, with_bias(1), step=1).path
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        hb.save(path, with_bias(1), step=1)


@pytest.mark.parametrize("url", ["memory://", "memory:///", "file:///"])
def test_a_url_names_a_folder(url: str) -> None:
    with pytest.raises(CheckpointError, match=r"names no folder. Name one in it."):
        hb.save(url, with_bias(1), step=1)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str, **options: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    with pytest.raises(CheckpointError, match="a scheme that fsspec does not know"):
        hb.checkpoint.latest("none://bucket/run")
    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(CheckpointError, match=r"not installed: pip install 'hotbed\[s3\]'$"):
        hb.load("s3://missing/run", with_bias(1))
    with pytest.raises(CheckpointError, match=r"pip install 'hotbed\[gcs\]'$"):
        hb.save("gs://bucket/run", with_bias(1), step=1)
    with pytest.raises(CheckpointError, match=r"not installed: Install s3fs"):
        hb.checkpoint.list("other://bucket/run")


def test_a_url_that_was_made_a_path() -> None:
    with pytest.raises(
        CheckpointError, match=r"s3:/bucket/run has lost a slash.* Give it as a str."
    ):
        hb.save(Path("s3://bucket/run"), with_bias(1), step=1)
    with pytest.raises(CheckpointError, match="Give it as a str."):
        hb.checkpoint.latest(Path("memory://run"))


def test_threads_share_connections() -> None:
    stores = [store_of("memory://one")]
    thread = threading.Thread(target=lambda: stores.append(store_of("memory://one/step")))
    thread.start()
    thread.join()
    assert stores[0] is stores[1] is not store_of("memory://two")


def test_there_are_no_links(root: str, tmp_path: Path) -> None:
    model, optimizer = made("ssd", tmp_path)
    train(model, optimizer, range(1))
    with pytest.raises(CheckpointError, match="hard links, which object storage does not have"):
        hb.save(root, model, optimizer, step=1, linked=True)
    assert not storage_of(root).exists(root)
    hb.save(root, model, optimizer, step=1)
    with pytest.raises(CheckpointError, match="pack .* is portable as it is"):
        hb.checkpoint.pack(root)


def test_linked_files_that_were_copied_there(tmp_path: Path) -> None:
    root = new_root("memory", tmp_path)
    model, optimizer = made("ssd", tmp_path)
    train(model, optimizer, range(1))
    here = Path(hb.save(tmp_path / "run", model, optimizer, step=1, linked=True).path)
    for file in here.rglob("*"):
        if file.is_file():
            put(f"{root}/{here.name}/{file.relative_to(here)}", file.read_bytes())
    with pytest.raises(CheckpointError, match="Pack a checkpoint before you copy it there"):
        [*hb.checkpoint.read(root, ITEM)]


def test_what_cannot_be_saved_leaves_nothing(root: str) -> None:
    def chunks() -> Iterator[Any]:
        yield torch.arange(3), torch.zeros(3, 2)
        raise RuntimeError("no more")

    hb.save(root, with_bias(1), step=1)
    with pytest.raises(RuntimeError, match="no more"):
        hb.checkpoint.write(root, {"t": chunks()}, step=2)
    assert folders_in(root) == ["step-000000000001"] and bias_in(root) == 1


def test_nothing_is_overwritten(root: str) -> None:
    store = store_of(root)
    store.write_new(f"{root}/x", [b"ab", memoryview(b"c"), b""])
    with pytest.raises(FileExistsError):
        store.write_new_beside(f"{root}/x", [b"other"])
    assert contents_of(f"{root}/x") == b"abc"
    store.write_new_beside(f"{root}/empty", [])
    assert contents_of(f"{root}/empty") == b""
    with store.open_plain(f"{root}/x") as file:
        room = bytearray(9)
        assert (file.size, file.readinto(memoryview(room)), bytes(room[:3])) == (3, 3, b"abc")
        assert file.readinto(memoryview(room)) == 0
    with pytest.raises(DamagedError, match="is no plain file"):
        store.open_plain(root)


# -- ranges and requests -----------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By the name of a file of rows, the bytes that are read of it."""
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 1024)
    found: dict[str, int] = {}
    contents = Objects.contents

    def counted(self: Objects, path: str, *place: Any) -> bytes:
        some = contents(self, path, *place)
        if "rows-" in path:
            name = os.path.basename(path)
            found[name] = found.get(name, 0) + len(some)
        return some

    monkeypatch.setattr(Objects, "contents", counted)
    return found


def test_ids_alone_are_read_where_they_are_asked_for(tmp_path: Path, read: dict[str, int]) -> None:
    root = new_root("memory", tmp_path)
    tables = hb.EmbeddingCollection([hb.Table("t", 32)])
    tables.assign("t", torch.arange(1000), torch.randn(1000, 32))
    hb.save(root, tables, step=1)
    hb.erase(tables, {"t": [7]})
    hb.save(root, tables, step=2)
    assert hb.checkpoint.contains(root, "t", [3, 7]).tolist() == [True, False]
    assert 8000 < sum(read.values()) < 12_000  # of 136 kB
    read.clear()
    assert hb.checkpoint.changes(root, "t", since=1).erased.tolist() == [7]
    assert 16_000 < sum(read.values()) < 24_000


def test_of_files_with_rows_of_other_ranks_the_ids_alone_are_read(
    tmp_path: Path, read: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "FILE_BYTES", 1)
    monkeypatch.setattr("hotbed.checkpoint.single.FILE_BYTES", 100 * (8 + 4 * 64))
    root, weights = new_root("memory", tmp_path), torch.randn(400, 64)
    folder = hb.checkpoint.write(root, {"t": [(torch.arange(400), weights)]})

    def wanted(stem: str, ids: torch.Tensor) -> bool:
        return bool((ids == 250).any())

    manifest = read_manifest(folder)
    found = [*rows.read_rows(folder, manifest, ["t"], any_wanted=wanted)]
    assert [len(some.tensors["ids"]) for _, some in found] == [0, 0, 100, 0]
    assert torch.equal(found[2][1].tensors["weights"], weights[200:300])
    assert all(some.tensors["weights"].shape[1] == 64 for _, some in found)
    assert [read[f"rows-0-{n}.safetensors"] for n in (0, 1, 3)] == [1024] * 3
    assert read["rows-0-2.safetensors"] > 100 * 64 * 4


def test_files_with_other_columns_are_not_read(tmp_path: Path, read: dict[str, int]) -> None:
    root, ids, weights = new_root("memory", tmp_path), torch.arange(9), torch.randn(9, 4)
    hb.checkpoint.write(root, {"t": [(ids, weights)]})
    with new_folder(root, 1) as new:
        files = [
            one
            for writer, own in enumerate((slice(0, 3), slice(3, 4)))
            for one in rows.write_files(
                new.path, [("t", own, {"ids": ids, "weights": weights[:, own]})], writer
            )
        ]
        dense = {"name": "dense.safetensors", "rows": {}}
        dense |= tensors.write_tensors(f"{new.path}/dense.safetensors", {})
        before = {k: v for k, v in read_manifest(complete_in(root)[0]).items() if k != "crc32c"}
        folder = new.complete({**before, "step": 1, "files": [dense, *files]})
    read.clear()
    manifest = read_manifest(folder)
    ((_, found),) = whole_rows(folder, manifest, {"t": slice(3, 4)}, ())
    assert torch.equal(found.tensors["weights"], weights[:, 3:]) and [*read] == [files[1]["name"]]
    (chunk,) = hb.checkpoint.read(root, "t")
    assert torch.equal(chunk.weights, weights)


def test_large_files_go_in_parts(s3_root: str) -> None:
    """Of 16 MiB: S3 takes none that are smaller than 5."""
    weights = torch.randn(20_000, 512)
    hb.checkpoint.write(s3_root, {"t": [(torch.arange(20_000), weights)]})
    (chunk,) = hb.checkpoint.read(s3_root, "t")
    assert torch.equal(chunk.weights, weights)
    client = storage_of(s3_root)
    path = f"{s3_root}/step-000000000000/rows-0-0.safetensors"
    assert client.info(path)["ETag"].strip('"').endswith("-2")  # its parts


def test_a_server_that_fails_in_the_middle_of_an_upload(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moto.s3.exceptions import S3ClientError
    from moto.s3.models import S3Backend

    hb.save(s3_root, with_bias(1), step=1)
    uploaded, upload = [], S3Backend.upload_part

    def fail(self: Any, *given: Any, **options: Any) -> Any:
        uploaded.append(given)
        if len(uploaded) > 1:
            raise S3ClientError("MalformedXML", "no more")
        return upload(self, *given, **options)

    monkeypatch.setattr(S3Backend, "upload_part", fail)
    weights = torch.randn(20_000, 512)
    with pytest.raises(OSError, match=r"rows-0-0.safetensors"):
        hb.checkpoint.write(s3_root, {"t": [(torch.arange(20_000), weights)]}, step=2)
    assert len(uploaded) > 1 and folders_in(s3_root) == ["step-000000000001"]
    assert not storage_of(s3_root).list_multipart_uploads(BUCKET)
    assert bias_in(s3_root) == 1


def test_a_server_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = new_root("memory", tmp_path)
    hb.save(root, with_bias(1), step=1)
    hb.save(root, with_bias(2), step=2)

    def gone(self: Any, *given: Any, **options: Any) -> Any:
        raise RuntimeError("no connection")

    kind = type(storage_of(root))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "ls", gone)
        for call in (hb.checkpoint.latest, hb.checkpoint.list, bias_in):
            with pytest.raises(
                CheckpointError, match=r"cannot be read: RuntimeError: no connection"
            ):
                call(root)
        with pytest.raises(OSError, match="no connection"):
            hb.save(root, with_bias(3), step=3)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "cat_file", gone)
        with pytest.raises(OSError, match="no connection"):
            bias_in(root)
        hb.save(
            root, with_bias(3), step=3, keep=1
        )  # nothing goes that cannot be told to be superfluous
    assert [one.step for one in hb.checkpoint.list(root)] == [1, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(kind, "pipe_file", gone)
        with pytest.raises(OSError, match="no connection"):
            hb.save(root, with_bias(4), step=4)
    assert [one.step for one in hb.checkpoint.list(root)] == [1, 2, 3]


def test_there_is_no_bucket(endpoint: str) -> None:
    with pytest.raises(
        CheckpointError, match="There is no bucket for s3://none/run. Make it first."
    ):
        hb.save("s3://none/run", with_bias(1), step=1)
    with pytest.raises(CheckpointError, match="There is no folder 's3://none/run'"):
        bias_in("s3://none/run")


# -- writers -----------------------------------------------------------------------------------------


def test_two_writers_take_different_names(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one does not see the other's folder yet when it chooses its own."""
    with new_folder(root, 1) as first, new_folder(root, 1) as second:
        assert first.path != second.path
    folders = RemoteStore.folders_in
    root += "-other"
    with new_folder(root, 7) as first:
        unseen = [True]

        def late(self: RemoteStore, folder: str) -> list[str]:
            found = folders(self, folder)
            return [] if unseen and unseen.pop() else found

        with monkeypatch.context() as patch:
            patch.setattr(RemoteStore, "folders_in", late)
            with new_folder(root, 7) as second:
                assert second.path == f"{first.path}.1"
        assert len(names_in(first.path)) == 1  # its lease alone


@pytest.mark.filterwarnings("ignore:Another process saves")
def test_many_save_and_load_at_once(root: str) -> None:
    """One may come behind one that was begun later: it fails, and the other stays."""
    hb.save(root, with_bias(0), step=0)
    told: list[Exception] = []

    def save(step: int) -> None:
        try:
            hb.save(root, with_bias(step), step=step)
        except CheckpointError as error:
            told.append(error)

    threads = [threading.Thread(target=save, args=(step,)) for step in range(1, 5)]
    for each in threads:
        each.start()
    assert bias_in(root) in range(5)
    for each in threads:
        each.join(60)
    assert all("Another process has completed a later checkpoint" in str(e) for e in told)
    found = hb.checkpoint.list(root)
    assert len(found) == 5 - len(told) and {one.state for one in found} == {"whole"}
    check_whole(root)


def test_one_that_is_overtaken_fails(root: str) -> None:
    with (
        pytest.raises(CheckpointError, match="has completed a later checkpoint beside"),
        new_folder(root, 1) as new,
    ):
        hb.save(root, with_bias(2), step=2)
        new.complete({"step": 1})
    assert folders_in(root) == ["step-000000000002"] and bias_in(root) == 2


def test_files_are_looked_at_before_the_manifest_comes(root: str) -> None:
    files = [{"name": "rows-0-0.safetensors", "bytes": 3, "crc32c": [], "rows": {}}]
    with (
        pytest.raises(CheckpointError, match=r"not written as it should: .* has 2 bytes"),
        new_folder(root, 1) as new,
    ):
        put(f"{new.path}/rows-0-0.safetensors", b"ab")
        new.complete({"step": 1, "files": files})
    assert not complete_in(root) and names_in(root) == []


KILLED = """
import os, sys
from checkpoint.small_models import with_bias
import hotbed as hb
from hotbed.checkpoint.stores.objects import Objects

put = Objects.put_new
def die(self, path, pieces):
    put(self, path, pieces)
    if path.endswith("rows-0-0.safetensors"):
        os._exit(9)

hb.save(sys.argv[1], with_bias(1), step=1)
Objects.put_new = die
hb.save(sys.argv[1], with_bias(2), step=2)
"""


@pytest.mark.process
def test_a_process_that_is_killed(s3_root: str, endpoint: str) -> None:
    there = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, **environment_of(endpoint), "PYTHONPATH": there}
    done = subprocess.run([sys.executable, "-c", KILLED, s3_root], env=environment, check=False)
    assert done.returncode == 9
    assert [(one.step, one.state) for one in hb.checkpoint.list(s3_root)] == [
        (1, "whole"),
        (2, "being written"),
    ]
    assert bias_in(s3_root) == 1
    hb.save(s3_root, with_bias(2), step=2)
    assert [(one.step, one.state) for one in hb.checkpoint.list(s3_root)] == [
        (1, "whole"),
        (2, "being written"),
        (2, "whole"),
    ]
    assert bias_in(s3_root) == 2


def train_on_ranks(rank: int, world: int, root: str, endpoint: str) -> None:
    os.environ.update(environment_of(endpoint))
    model = hb.EmbeddingCollection([hb.Table("t", 4, 60), hb.Table("u", 4)], seed=1)
    hb.distribute(model)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    for step in range(2):
        drawn = random.Random(10 * step + rank)
        batch = {n: torch.tensor([drawn.randrange(60) for _ in range(8)]) for n in "tu"}
        sum(each.sum() for each in model(batch).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    hb.save(root, model, optimizer, step=1)
    ids = torch.arange(60)
    before = {name: model.lookup(name, ids) for name in "tu"}
    hb.save(root, model, optimizer, step=2, blocking=False, keep=1).wait()
    other = hb.EmbeddingCollection([hb.Table("t", 4, 60), hb.Table("u", 4)], seed=2)
    hb.distribute(other)
    hb.load(root, other, hb.optim.Adagrad(other.parameters(), lr=0.1))
    for name in "tu":
        assert torch.equal(other.lookup(name, ids), before[name])


@pytest.mark.process
def test_ranks(s3_root: str, endpoint: str) -> None:
    on_ranks(2, train_on_ranks, s3_root, endpoint)
    assert folders_in(s3_root) == ["step-000000000002"]
    files = names_in(f"{s3_root}/step-000000000002")
    assert {"rows-0-0.safetensors", "rows-1-0.safetensors"} < {*files}
    check_whole(s3_root)


# -- the command line --------------------------------------------------------------------------------


def ok(*arguments: Any) -> Result:
    result = hotbed(*arguments, columns=300)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_commands(kind: str, tmp_path: Path) -> None:
    root = new_root(kind, tmp_path)
    log, scores = tmp_path / "clicks.tsv", tmp_path / "scores.csv"
    write_criteo_tsv(str(log), rows=256, seed=2)
    size = ("--dim", 4, "--batch-size", 32, "--every", 2, "--test-fraction", 0)
    train = ("train", "--data", log, *size)
    run, model = f"{root}/run", f"{root}/model"
    ok(*train, "--checkpoint", run, "--save", model, "--full-every", 2)
    found = complete_in(run)
    assert [os.path.basename(path)[-1] for path in found] == ["4", "6", "8"]

    shown = ok("checkpoint", "show", run).output
    assert "changes since" in shown and f"{found[-1]}, step 8" in shown.replace("\n", "")
    assert "is whole" in ok("checkpoint", "verify", "--all", run).output
    ok("checkpoint", "diff", run, model)
    ok("checkpoint", "merge", run, "--out", f"{root}/merged")
    assert all(one[1:4] == (0, 0, 0) for one in differences(f"{root}/merged", model))
    refused = hotbed("checkpoint", "pack", run)
    assert refused.exit_code and "object storage" in " ".join(refused.stderr.split())

    refused = hotbed(*train, "--checkpoint", run)
    assert refused.exit_code == 2 and "holds checkpoints of a run" in refused.stderr
    resumed = tmp_path / "resumed.json"
    last = os.path.basename(found[1])
    ok(*train, "--checkpoint", run, "--resume-from", last, "--json", resumed)
    assert '"resumed_at": 6' in resumed.read_text()
    assert all(one[1:4] == (0, 0, 0) for one in differences(run, model))
    ok(*train, "--checkpoint", run, "--resume", "--epochs", 2)
    ok(*train, "--from", model, "--save", model)

    ok("predict", f"{root}/merged", "--data", log, "--out", scores)
    assert len(scores.read_text().splitlines()) == 257


def test_commands_with_s3(s3_root: str, tmp_path: Path) -> None:
    log, scores = tmp_path / "clicks.tsv", tmp_path / "scores.csv"
    write_criteo_tsv(str(log), rows=64, seed=2)
    train = ("train", "--data", log, "--dim", 4, "--batch-size", 32, "--test-fraction", 0)
    run = (*train, "--checkpoint", s3_root, "--every", 2, "--background", "--resume", "--epochs")
    for epochs, step in ((1, 2), (2, 4)):
        ok(*run, epochs)
        assert hb.checkpoint.list(s3_root)[-1].step == step
    ok("predict", s3_root, "--data", log, "--out", scores)
    assert len(scores.read_text().splitlines()) == 65
