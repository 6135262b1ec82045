"""Versions of a bundle: listed, read in layers, merged, pinned, and removed when they are old."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.followed_runs import Run, check_rows_and_weights, rows_in, served_from

from hotbed import _core
from hotbed.serve import BundleError
from hotbed.serve.bundles.bundle import FileEntry, TableEntry
from hotbed.serve.bundles.defaults import OneVector
from hotbed.serve.bundles.layers import NewLayer, StoredRows, merge_layers
from hotbed.serve.bundles.manifests import files_in
from hotbed.serve.bundles.versions import current, open_layers, pin, pinned, unpin, versions_of
from hotbed.serve.following.follower import Follower
from hotbed.serve.following.layer_merges import LayerMerges
from hotbed.serve.following.new_version import Layer


def followed(run: Run, follower: Follower, count: int) -> list[str]:
    """Train and follow so many times. Returns the new versions."""
    found = []
    for _ in range(count):
        run.train()
        run.save(delta=True)
        applied = follower.poll()
        assert applied is not None
        found.append(applied.version.model_version)
    return found


def names_of(bundle: Path) -> list[str]:
    return [each.model_version for each in versions_of(bundle)]


def test_old_versions_are_removed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    (base,) = names_of(bundle)
    with Follower(bundle, run.root, keep=2) as follower:
        made = followed(run, follower, 2)
        assert names_of(bundle) == [base, *made]
        opened = served_from(bundle)
        before = rows_in(opened.tables)
        made += followed(run, follower, 3)
        assert names_of(bundle) == [base, *made[-2:]]
        assert not os.path.exists(opened.version.folder)
        for stem, rows in rows_in(opened.tables).items():  # who has them open still has them
            np.testing.assert_array_equal(rows, before[stem])
        with pytest.raises(BundleError, match="cannot be read"):
            open_layers(bundle, opened.version)
    assert [each.number for each in versions_of(bundle)] == [0, 4, 5]
    check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_a_pinned_version_stays_and_is_served(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    (base,) = names_of(bundle)
    assert pinned(bundle) is None
    with Follower(bundle, run.root, keep=1) as follower:
        (first,) = followed(run, follower, 1)
        then = run.loaded()
        assert pin(bundle, first) == current(bundle) == versions_of(bundle)[-1]
        made = followed(run, follower, 3)
        assert names_of(bundle) == [base, first, made[-1]] and pinned(bundle) == first
        check_rows_and_weights(served_from(bundle), then, tmp_path / "expected")
        with pytest.raises(BundleError, match=f"no version 'other'. It has {base}, {first}"):
            pin(bundle, "other")
        assert current(bundle).model_version == first
        pin(bundle, base)
        assert current(bundle).number == 0
        unpin(bundle)
        unpin(bundle)
        assert pinned(bundle) is None and current(bundle).model_version == made[-1]
        made = followed(run, follower, 1)
        assert names_of(bundle) == [base, made[-1]]


def test_a_pin_that_cannot_be_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root, keep=1) as follower:
        made = followed(run, follower, 1)
        pin(bundle, made[0])
        path = Path(current(bundle).folder).parent / "pinned.json"
        for contents in ("", "[]"):
            path.write_text(contents)
            with pytest.raises(BundleError, match="Pin"):
                current(bundle)
        made += followed(run, follower, 1)  # nothing goes that may be pinned
        assert names_of(bundle)[1:] == made
        pin(bundle, made[0])
        assert current(bundle).model_version == made[0]


@pytest.mark.parametrize("what", ["manifest", "size", "missing", "dense", "short", "name"])
def test_a_damaged_version_is_refused_and_made_again(tmp_path: Path, what: str) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        (before, made) = followed(run, follower, 2)
    version = current(bundle)
    folder = Path(version.folder)
    rows = next((folder / "tables").glob("0.2.rows.npy"))
    match what:
        case "manifest":
            manifest = folder / "version.json"
            manifest.write_text(manifest.read_text().replace('"number": 2', '"number": 3'))
        case "size":
            rows.write_bytes(rows.read_bytes()[:-1])
        case "missing":
            rows.unlink()
        case "dense":
            (folder / "dense.onnx").unlink()
        case "short":
            os.truncate(folder / "dense.onnx", 99)
        case "name":
            os.rename(folder, folder.parent / "00000003.another")
            version = current(bundle)
    with pytest.raises(BundleError, match="cannot be read|damaged|bytes|another version"):
        open_layers(bundle, version)
    if what == "name":
        shutil.rmtree(version.folder)
    assert current(bundle).model_version != before or what == "name"
    with Follower(bundle, run.root) as follower:
        again = follower.poll()
        assert again is not None and again.version.model_version == made
    check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_a_bundle_replaced_while_it_is_opened(tmp_path: Path) -> None:
    run = Run(tmp_path)
    bundle = run.export()
    version = current(bundle)
    run.export()
    with pytest.raises(BundleError, match="was replaced while it was opened"):
        open_layers(bundle, version)


def test_a_bundle_replaced_while_a_version_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    other = run.export("other")

    def replacing(*given: Any) -> list[FileEntry]:
        os.replace(other / "bundle.json", bundle / "bundle.json")
        return files_in(*given)

    with Follower(bundle, run.root) as follower:
        run.train()
        run.save(delta=True)
        with monkeypatch.context() as patch:
            patch.setattr("hotbed.serve.following.new_version.files_in", replacing)
            with pytest.raises(BundleError, match="replaced meanwhile"):
                follower.poll()
        assert [each.number for each in versions_of(bundle)] == [0]
        assert follower.poll() is not None


def test_files_are_those_of_the_manifest(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export(rows="int8")
    with Follower(bundle, run.root) as follower:
        followed(run, follower, 3)
    folder = Path(current(bundle).folder)
    manifest = json.loads((folder / "version.json").read_text())
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert there == {each["name"] for each in manifest["files"]} | {"version.json"}
    for each in manifest["files"]:
        contents = np.fromfile(folder / each["name"], np.uint8)
        assert (len(contents), f"{_core.crc32c(contents):08x}") == (each["bytes"], each["crc32c"])
    for entries in manifest["tables"].values():
        assert [each["files"][-1] for each in entries] == ["1", "2", "3"]
        for each in entries:
            ids = np.load(folder / f"{each['files']}.ids.npy")
            assert len(ids) == each["rows"] and (np.diff(ids) > 0).all() and not each["static"]


@pytest.mark.parametrize("links", [True, False])
def test_many_layers_become_few(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    most = 0
    with Follower(bundle, run.root, most_layers=3) as follower:
        for _ in range(14):
            run.erase({run.step % 40})
            followed(run, follower, 1)
            served = served_from(bundle)
            check_rows_and_weights(served, run.loaded(), tmp_path / "expected")
            most = max(most, *(len(table.layers) for table in served.tables.values()))
            follower.wait_for_merges()
    assert most == 1 + 4  # the bundle's, and one more than those above which merging begins
    folder = Path(current(bundle).folder)
    assert any("m." in name for name in os.listdir(folder / "tables"))
    left = {name for name in os.listdir(folder.parent) if name.endswith(".part")}
    assert len(left) <= 1  # merged for the next one
    with Follower(bundle, run.root):
        assert not [name for name in os.listdir(folder.parent) if name.endswith(".part")]


def test_a_merge_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root, most_layers=2) as follower:
        with monkeypatch.context() as patch:
            patch.setattr("hotbed.serve.following.layer_merges.merge_layers", full)
            followed(run, follower, 3)
            follower.wait_for_merges()
        run.train()
        run.save(delta=True)
        for _ in range(2):  # of two tables
            with pytest.raises(OSError, match="No space left"):
                follower.poll()
        assert follower.poll() is not None
        check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")
        follower.wait_for_merges()
        followed(run, follower, 1)
        assert max(len(table.layers) for table in served_from(bundle).tables.values()) <= 4
        check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


BASE: TableEntry = {"files": "tables/0", "dim": 3, "rows": 9, "static": True, "stored_as": "int8"}


def layer_of(folder: Path, number: int, rows: dict[int, int]) -> Layer:
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    with NewLayer(str(folder), f"tables/0.{number}", BASE) as new:
        for begin in range(0, len(rows), 2):
            ids = np.array([*rows][begin : begin + 2])
            bits = np.array([[rows[each]] * 11 for each in ids.tolist()], np.uint8)
            new.add(ids, bits)
        entry = new.finish(OneVector(np.zeros(3, np.float32)))
    assert entry is not None and [*folder.rglob("*.unsorted")] == []
    return Layer(str(folder), entry)


ROWS = st.dictionaries(
    st.integers(-(2**62), 2**62) | st.integers(0, 5), st.integers(0, 255), min_size=1
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5))
def test_of_merged_layers_the_newest_counts(
    tmp_path_factory: pytest.TempPathFactory, layers: list[dict[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("layers")
    made = [layer_of(folder, number, rows) for number, rows in enumerate(layers)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.serve.bundles.layers.AT_ONCE", 3)
        entry = merge_layers(str(folder), "tables/0.m", [StoredRows(*each) for each in made])
    merged = StoredRows(str(folder), entry)
    expected: dict[int, int] = {}
    for rows in layers:
        expected.update(rows)
    assert merged.ids is not None and merged.ids.tolist() == sorted(expected)
    bits = merged.bits(np.arange(len(merged)))
    assert bits.tolist() == [[expected[each]] * 11 for each in sorted(expected)]
    asked = np.array([0, 1, 2, 2**62, -(2**62), 7])
    at, there = merged.find(asked)
    assert there.tolist() == [each in expected for each in asked.tolist()]
    assert merged.ids[at[there]].tolist() == asked[there].tolist()


def test_an_empty_layer_is_none(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    with NewLayer(str(tmp_path), "tables/0.1", BASE) as new:
        new.add(np.empty(0, np.int64), np.empty((0, 11), np.uint8))
        assert new.finish(OneVector(np.zeros(3, np.float32))) is None
    assert [*tmp_path.rglob("*.npy")] == []


@pytest.mark.parametrize(
    ("sizes", "merged"),
    [([9, 9, 9], 3), ([100, 9, 9], 2), ([30, 9, 9], 3), ([1000, 100, 9, 9], 2), ([1, 100], 2)],
)
def test_few_rows_are_not_merged_with_many(tmp_path: Path, sizes: list[int], merged: int) -> None:
    layers = [
        layer_of(tmp_path / str(number), number, dict.fromkeys(range(size), number))
        for number, size in enumerate(sizes)
    ]
    merges = LayerMerges(str(tmp_path), most=1)
    merges.begin({"t": layers})
    merges.wait()
    found = merges.take({"t": layers})["t"]
    merges.close()
    assert found[:-1] == layers[: len(sizes) - merged]
    assert found[-1].entry["rows"] == max(sizes[-merged:])
