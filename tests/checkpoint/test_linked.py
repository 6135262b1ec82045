"""Checkpoints that share the files of an SSD tier: what is loaded is what was saved, whatever the tier
does to its files since."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.grown_runs import loaded
from checkpoint.small_models import ROWS, Model, everything, made, optimizer_of, same, train
from checkpoint.test_background import WIDTHS, Gate, act
from checkpoint.test_deltas import user_ids
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_in import storage_of
from resolve.small_logs import small_logs
from typer.testing import CliRunner

import hotbed as hb
from hotbed.checkpoint import CheckpointError, DamagedError
from hotbed.checkpoint.files import read_json_sealed, write_json_sealed
from hotbed.checkpoint.inspect import contents, verified
from hotbed.cli.app import app

ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(0, 30)),
    st.tuples(st.just("ahead"), st.integers(0, 30)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("look"), st.integers(0, 30)),
    st.tuples(st.just("erase"), st.sets(st.integers(0, 39), max_size=6)),
    st.tuples(st.just("assign"), st.sets(st.integers(0, 39), min_size=1, max_size=4)),
    st.tuples(st.just("write"), st.sets(st.integers(0, 39), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["save", "delta", "load back"]), st.just(0)),
)


@pytest.fixture(autouse=True)
def logs_of_small_files() -> Iterator[None]:
    with small_logs():
        yield


def written_to_ssd(model: Model) -> float:
    written: float = model.embeddings.stats()["rows_to_ssd"]
    return written


def assert_alike(path: str | Path, files: str | Path, rule: str = "Adam", **options: Any) -> None:
    """Two checkpoints are loaded as the same rows, into memory and over an SSD, and are trained alike."""
    for place in ("memory", options.pop("place", "ssd")):
        numbers = []
        for one in (path, files):
            model, optimizer = loaded(one, rule, place, **options)
            numbers.append(everything(model, optimizer if place == "memory" else None))
            with torch.random.fork_rng():
                torch.manual_seed(0)
                losses = train(model, optimizer, range(40, 42))
            numbers[-1] |= {str(at): loss for at, loss in enumerate(losses)}
            numbers[-1] |= {f"{n} later": v for n, v in everything(model).items()}
        assert same(*numbers)


def with_files(tmp_path: Path, model: Model, optimizer: Any) -> str:
    """A checkpoint of this moment that has no links."""
    return hb.save(tmp_path / "files", model, optimizer, step=0).path


def links_in(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).glob("log-*/*.rows"))


@settings(max_examples=examples(15, 5_000))
@given(
    actions=st.lists(ACTIONS, min_size=3, max_size=14),
    rule=st.sampled_from(sorted(WIDTHS)),
    options=st.sampled_from([{}, {"untouched": "exact"}]),
    place=st.sampled_from(["tight", "ssd", "three"]),
)
def test_linked_checkpoints_are_as_those_with_files(
    actions: list[tuple[str, Any]], rule: str, options: dict[str, Any], place: str
) -> None:
    """Of one that is loaded into tiers files are linked again, and training goes on from there; whatever
    comes, each is as a copy of that moment."""
    if place == "three":
        options = {}
    with tempfile.TemporaryDirectory() as folder:
        run, copies = Path(folder, "run"), Path(folder, "copies")
        options = {**options, "lr": 0.005}
        if place == "tight":
            options["dims"] = (WIDTHS[rule], WIDTHS[rule] - 50)
        model, optimizer = made(place, Path(folder, "a"), rule, **options)
        train(model, optimizer, range(2))
        pairs: list[tuple[str, str]] = []

        def save(delta: bool) -> None:
            made_of = hb.save(run, model, optimizer, step=len(pairs), linked=True, delta=delta)
            own = hb.save(copies, model, optimizer, step=len(pairs))
            pairs.append((made_of.path, own.path))
            assert bool(links_in(made_of.path)) == (made_of.base is None)
            if made_of.base is None:
                assert made_of.rows == own.rows

        save(False)
        for action, value in [*actions, ("save", 0), ("train", 7)]:
            if action in ("save", "delta"):
                save(action == "delta")
            elif action == "load back":
                hb.load(pairs[-1][0], model, optimizer)
            else:
                optimizer = act(action, value, model, optimizer, Gate(), run)
        for linked, own in pairs:
            assert [fault for _, _, fault in verified(linked) if fault] == []
            assert_alike(linked, own, rule, place=place, **options)


def test_the_cost_is_what_memory_has(tmp_path: Path) -> None:
    """A second save writes nothing, and files that are linked are not written to again."""
    model, optimizer = made("ssd", tmp_path, "Adam")
    train(model, optimizer, range(6))
    first = hb.save(tmp_path / "run", model, optimizer, step=6, linked=True)
    written = written_to_ssd(model)
    before = {path: path.read_bytes() for path in links_in(first.path)}
    assert before
    second = hb.save(tmp_path / "run", model, optimizer, step=7, linked=True)
    assert written_to_ssd(model) == written
    assert {p.stat().st_ino for p in links_in(second.path)} == {p.stat().st_ino for p in before}
    train(model, optimizer, range(6, 20))
    model.embeddings.flush()
    assert {path: path.read_bytes() for path in links_in(first.path)} == before


def test_loading_links_again(tmp_path: Path) -> None:
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    train(model, optimizer, range(6))
    saved = hb.save(tmp_path / "run", model, optimizer, step=6, linked=True)
    other, its_optimizer = made("ssd", tmp_path / "b", "Adam")
    train(other, its_optimizer, range(100, 103))
    before = written_to_ssd(other)
    hb.load(tmp_path / "run", other, its_optimizer)
    assert written_to_ssd(other) == before
    inodes = {path.stat().st_ino for path in (tmp_path / "b" / "rows").rglob("*.rows")}
    assert {path.stat().st_ino for path in links_in(saved.path)} <= inodes
    for one, its in ((model, optimizer), (other, its_optimizer)):
        torch.manual_seed(1)
        train(one, its, range(6, 12))
        one.embeddings.erase("user", user_ids({1, 2, 3}))
    files = with_files(tmp_path, model, optimizer)
    again = hb.save(tmp_path / "again", other, its_optimizer, step=12, linked=True)
    shutil.rmtree(tmp_path / "run")
    assert_alike(again.path, files)
    train(other, its_optimizer, range(12, 14))
    last = hb.save(tmp_path / "again", other, its_optimizer, step=14, linked=True).path
    assert_alike(again.path, files)
    assert_alike(last, with_files(tmp_path, other, its_optimizer))


@pytest.mark.parametrize(
    "change",
    ["another optimizer", "none", "another dtype", "more tables", "rows there"],
)
def test_loading_where_files_do_not_fit(tmp_path: Path, change: str) -> None:
    """Rows are read then, as of any checkpoint."""
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    train(model, optimizer, range(6))
    linked = hb.save(tmp_path / "run", model, optimizer, step=6, linked=True).path
    files = hb.save(tmp_path / "copy", model, optimizer, step=6).path
    found = []
    for path, folder in ((linked, "b"), (files, "c")):
        dtype = torch.float16 if change == "another dtype" else torch.float32
        other = Model("ssd", tmp_path / folder, dtype=dtype)
        optimizers = [optimizer_of(other, "Adam")]
        if change == "none":
            optimizers = []
        elif change == "another optimizer":
            hb.load(path, other)
            optimizers = [optimizer_of(other, "SGD", replace_state=True)]
        elif change == "more tables":
            other = Model("memory", tmp_path)
            tables = [hb.Table("item", 4, rows=60), hb.Table("user", 3, padding_idx=-1)]
            other.embeddings = hb.EmbeddingCollection(
                [*tables, hb.Table("more", 4)],
                seed=0,
                storage=storage_of("ssd", tmp_path / "more" / folder),
            )
            other.embeddings.assign("more", [1, 2, 3], torch.ones(3, 4))
            optimizers = [optimizer_of(other, "Adam")]
        elif change == "rows there":
            train(other, optimizers[0], range(50, 60))
        strict = change != "more tables"
        if change != "another optimizer":
            hb.load(path, other, optimizers if optimizers and strict else None, strict=strict)
        if change == "more tables":
            assert torch.equal(other.embeddings.rows("more").values, torch.ones(3, 4))
        found.append(everything(other))
        if optimizers and strict:
            torch.manual_seed(0)
            found[-1] |= {"losses": train(other, optimizers[0], range(6, 9))}
    assert same(*found)


def test_compaction_and_pruning_break_no_link(tmp_path: Path) -> None:
    model, optimizer = made("tight", tmp_path / "a", "SGD", dims=(900, 850))
    run = tmp_path / "run"
    files = {}
    for step in range(12):
        train(model, optimizer, range(3 * step, 3 * step + 3))
        path = hb.save(run, model, optimizer, step=step, linked=True, keep=3).path
        files[path] = with_files(tmp_path, model, optimizer)
    kept = [one.path for one in hb.checkpoint.list(run)]
    assert kept == [*files][-3:]
    for path in kept:
        assert_alike(path, files[path], "SGD", place="tight", dims=(900, 850))
    about = contents(kept[0])
    assert 0 <= about["kept_bytes"] <= about["linked_bytes"] > 0
    del model, optimizer
    shutil.rmtree(tmp_path / "a")
    assert_alike(kept[0], files[kept[0]], "SGD", place="tight", dims=(900, 850))


def test_packing(tmp_path: Path) -> None:
    """It has files alone then, and stays the base of what was made from it."""
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    run = tmp_path / "run"
    train(model, optimizer, range(6))
    first = hb.save(run, model, optimizer, step=6, linked=True).path
    files = with_files(tmp_path, model, optimizer)
    train(model, optimizer, range(6, 8))
    later = hb.save(run, model, optimizer, step=8, delta=True, linked=True)
    assert later.base == first
    hb.checkpoint.merge(run, tmp_path / "merged")
    seen: list[int] = []
    assert hb.checkpoint.pack(first, progress=seen.append) == first and sum(seen) > 0
    assert sorted(os.listdir(first)) == [
        "checkpoint.json",
        "dense.safetensors",
        "rows-0-0.safetensors",
    ]
    assert [fault for _, _, fault in verified(str(run)) if fault] == []
    assert_alike(first, files)
    for path in (run, tmp_path / "merged"):
        assert_alike(path, with_files(tmp_path, model, optimizer))
    before = os.stat(os.path.join(first, "checkpoint.json")).st_mtime_ns
    assert hb.checkpoint.pack(first) == first
    assert os.stat(os.path.join(first, "checkpoint.json")).st_mtime_ns == before


def test_packing_that_fails_or_is_killed(tmp_path: Path, monkeypatch: Any) -> None:
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    train(model, optimizer, range(6))
    saved = hb.save(tmp_path / "run", model, optimizer, step=6, linked=True).path
    names = sorted(os.listdir(saved))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            hb.checkpoint.pack(saved)
    assert sorted(os.listdir(saved)) == names
    # What one that was killed before and behind the new manifest leaves.
    Path(saved, "rows-0-0.safetensors").write_bytes(b"half")
    Path(saved, "checkpoint.json.new").write_bytes(b"half")
    assert_alike(saved, with_files(tmp_path, model, optimizer))
    shutil.copytree(Path(saved, "log-0-0"), Path(saved, "log-7-0"))
    hb.checkpoint.pack(saved)
    assert not list(Path(saved).glob("log-*"))
    assert_alike(saved, with_files(tmp_path, model, optimizer))


def test_packed_with_something_that_stays(tmp_path: Path) -> None:
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    train(model, optimizer, range(6))
    saved = Path(hb.save(tmp_path / "run", model, optimizer, step=6, linked=True).path)
    (saved / "log-0-0" / "0-9999999999.rows").mkdir()
    with pytest.warns(UserWarning, match="is packed, and files that it needs no more"):
        hb.checkpoint.pack(saved)
    assert [fault for _, _, fault in verified(str(saved)) if fault] == []
    hb.load(saved, model, optimizer)


def test_packing_while_it_is_read(tmp_path: Path) -> None:
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    train(model, optimizer, range(2))
    saved = hb.save(tmp_path / "run", model, optimizer, step=2, linked=True).path
    reading = hb.checkpoint.read(saved, "embeddings.item")
    next(reading)
    with pytest.raises(CheckpointError, match="is being read"):
        hb.checkpoint.pack(saved)
    del reading
    hb.checkpoint.pack(saved)


def test_no_links_where_there_is_no_ssd(tmp_path: Path) -> None:
    model, optimizer = made("memory", tmp_path, "Adam")
    with pytest.raises(CheckpointError, match="no table lies over one"):
        hb.save(tmp_path / "run", model, optimizer, step=0, linked=True)
    assert not (tmp_path / "run").exists()
    model, optimizer = made("ssd", tmp_path, "Adam")
    with pytest.raises(CheckpointError, match="with their states"):
        hb.save(tmp_path / "run", model, optimizer, step=0, linked=True, states=False)
    with pytest.raises(CheckpointError, match="linked is 1"):
        hb.save(tmp_path / "run", model, optimizer, step=0, linked=1)


def test_another_file_system(tmp_path: Path) -> None:
    other = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        if other.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("this machine has one file system")
        model, optimizer = made("ssd", tmp_path, "Adam")
        train(model, optimizer, range(3))
        with pytest.raises(hb.StorageError, match="lie on one file system"):
            hb.save(other / "run", model, optimizer, step=0, linked=True)
        assert os.listdir(other) == []
        saved = hb.save(tmp_path / "run", model, optimizer, step=0, linked=True).path
        shutil.copytree(saved, other / "copy")  # and a copy is read there, into tiers here
        again, its_optimizer = made("ssd", tmp_path / "b", "Adam")
        hb.load(other / "copy", again, its_optimizer)
        assert same(everything(again), everything(model))
        train(model, optimizer, range(3, 6))
        hb.save(tmp_path / "run", model, optimizer, step=6, linked=True)
    finally:
        shutil.rmtree(other)


DAMAGE = {
    "a flipped bit": "checksum is wrong",
    "a block of zeros": r"good blocks, and was linked with \d+",
    "a missing file": "is missing|has 0 rows of",
    "a short file": "bytes and was saved with|the file has",
    "no manifest": "is missing|there is no file",
    "another manifest": "damaged|bytes and was saved with",
    "a link in place of the folder": "is a link",
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
@pytest.mark.parametrize("into", ["memory", "ssd"])
def test_damage(tmp_path: Path, damage: str, into: str) -> None:
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    train(model, optimizer, range(6))
    saved = hb.save(tmp_path / "run", model, optimizer, step=6, linked=True).path
    one = shutil.copytree(saved, tmp_path / "copy" / "step-000000000006")
    file = links_in(one)[0]
    match damage:
        case "a flipped bit":
            bits = bytearray(file.read_bytes())
            bits[100] ^= 1
            file.write_bytes(bits)
        case "a block of zeros":
            bits = bytearray(file.read_bytes())
            bits[:4096] = bytes(4096)
            file.write_bytes(bits)
        case "a missing file":
            file.unlink()
        case "a short file":
            os.truncate(file, file.stat().st_size - 4096)
        case "no manifest":
            (file.parent / "manifest").unlink()
        case "a link in place of the folder":
            file.parent.rename(tmp_path / "elsewhere")
            file.parent.symlink_to(tmp_path / "elsewhere")
        case _:
            (file.parent / "manifest").write_bytes(b"x" * 98)
    assert any(fault for _, _, fault in verified(str(one)))
    with pytest.raises(DamagedError, match=DAMAGE[damage]):
        for table in ("item", "user"):
            list(hb.checkpoint.read(one, f"embeddings.{table}"))
    other, its_optimizer = made(into, tmp_path / "b", "Adam")
    with pytest.raises(DamagedError, match=DAMAGE[damage]):
        hb.load(one, other, its_optimizer)
    hb.load(saved, other, its_optimizer)
    assert same(everything(other), everything(model))
    with pytest.raises(DamagedError):
        hb.checkpoint.pack(one)


@pytest.mark.parametrize("name", ["store", "number", "first", "stride"])
@pytest.mark.parametrize("value", [-1, 1, 10**30])
def test_numbers_out_of_range(tmp_path: Path, name: str, value: int) -> None:
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    train(model, optimizer, range(6))
    model.embeddings.assign("item", range(ROWS), torch.ones(ROWS, 4))
    saved = Path(hb.save(tmp_path / "run", model, optimizer, step=6, linked=True).path)
    manifest: Any = read_json_sealed(str(saved / "checkpoint.json"))[0]
    about = {k: v for k, v in manifest.items() if k != "crc32c"}
    rows = about["linked"][0]["rows"]["embeddings.item"]
    if rows[name] == value:
        value += 1
    rows[name] = value
    (saved / "checkpoint.json").unlink()
    write_json_sealed(str(saved / "checkpoint.json"), about)
    for use in (hb.checkpoint.pack, lambda path: [*hb.checkpoint.read(path, "embeddings.item")]):
        with pytest.raises(DamagedError):
            use(saved)


def test_the_command_line(tmp_path: Path) -> None:
    model, optimizer = made("ssd", tmp_path / "a", "Adam")
    for step in (1, 2):
        train(model, optimizer, range(step))
        hb.save(tmp_path / "run", model, optimizer, step=step, linked=True)
    run = str(tmp_path / "run")
    shown = CliRunner().invoke(app, ["checkpoint", "show", run])
    assert shown.exit_code == 0 and "MB linked" in shown.output
    checked = CliRunner().invoke(app, ["checkpoint", "verify", "--all", run])
    assert checked.exit_code == 0 and checked.output.count("is whole") == 2
    packed = CliRunner().invoke(app, ["checkpoint", "pack", run])
    assert packed.exit_code == 0 and "is portable" in packed.output
    assert not links_in(hb.checkpoint.latest(run) or "")
    assert_alike(run, with_files(tmp_path, model, optimizer))
