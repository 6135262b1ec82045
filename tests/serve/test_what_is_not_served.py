"""What a follower of a run cannot serve: it is told, and the version before stays."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from serve.followed_runs import (
    Model,
    Run,
    applied,
    batch_of,
    check_rows_and_weights,
    reseal,
    served_from,
)

import hotbed as hb
from hotbed.checkpoint import CheckpointError, DamagedError
from hotbed.serve import BundleError
from hotbed.serve.bundles.versions import current, versions_of
from hotbed.serve.following.follower import Follower, follow
from hotbed.serve.following.new_version import Written, write_version


@dataclasses.dataclass(frozen=True)
class Mine(hb.init.Constant):
    """No checkpoint tells of it."""


def test_first_values_that_are_not_known(tmp_path: Path) -> None:
    run = Run(tmp_path, place="ssd", about={"init": Mine(0.5)})
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        run.train()
        run.save(delta=True)
        applied(follower)
        run.erase({int(batch_of(run.step)["item"][0, 0])})
        run.step += 1
        run.save(delta=True)
        with pytest.raises(BundleError, match="an initializer that is none of hotbed.init"):
            follower.poll()


def test_a_base_that_goes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes as a later checkpoint is complete, which is taken in its place."""
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    run.train()
    run.save(delta=True)
    calls = []

    def pruned(*given: Any) -> Written:
        calls.append(given)
        if len(calls) == 1:
            run.train()
            run.save(keep=1)
            raise DamagedError("A file is missing.")
        return write_version(*given)

    with Follower(bundle, run.root) as follower:
        monkeypatch.setattr("hotbed.serve.following.follower.write_version", pruned)
        assert applied(follower).step == run.step and len(calls) == 2
    check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


@pytest.mark.parametrize(
    "what", ["hotbed.serve.following.new_version.files_in", "os.posix_fallocate"]
)
def test_a_disk_that_is_full(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    run.train()
    run.save(delta=True)
    with Follower(bundle, run.root) as follower:
        with monkeypatch.context() as patch:
            patch.setattr(what, full)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    follower.poll()
        assert os.listdir(bundle / "versions" / versions_of(bundle)[0].base) == []
        assert applied(follower).step == run.step
    check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_a_damaged_bundle_gets_no_versions(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    run.train()
    run.save(delta=True)
    dense = bundle / "dense.onnx"
    whole = dense.read_bytes()
    with Follower(bundle, run.root) as follower:
        dense.write_bytes(whole[:-9] + bytes(9))
        with pytest.raises(BundleError, match="dense.onnx is damaged"):
            follower.poll()
        dense.write_bytes(whole)
        run.train()
        run.save(delta=True)
        assert applied(follower).step == run.step


@pytest.mark.parametrize("what", ["manifest", "rows", "dense", "missing"])
def test_a_damaged_checkpoint_is_left_out(tmp_path: Path, what: str) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        run.train()
        run.save(delta=True)
        before = applied(follower)
        run.train()
        good = run.save(delta=True)
        run.train()
        bad = run.save()
        names = {"manifest": "checkpoint.json", "dense": "dense.safetensors"}
        damaged = Path(bad.path, names.get(what, "rows-0-0.safetensors"))
        contents = bytearray(damaged.read_bytes())
        contents[len(contents) // 2] ^= 1
        damaged.write_bytes(contents)
        if what == "missing":
            damaged.unlink()
        with pytest.raises(CheckpointError, match=os.path.basename(bad.path)):
            follower.poll()
        assert current(bundle) == before.version
        assert applied(follower).step == good.step  # the latest before it
        check_rows_and_weights(served_from(bundle), run.loaded(good.path), tmp_path / "expected")
        assert follower.poll() is None  # it is told once
        run.train()
        run.save()
        assert applied(follower).step == run.step
        check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")
        assert not [
            name for name in os.listdir(Path(before.version.folder).parent) if "part" in name
        ]


def test_nothing_goes_back_when_the_latest_is_damaged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    run.train()
    run.save()
    with Follower(bundle, run.root) as follower:
        run.train()
        served = run.save()
        applied(follower)
        run.train()
        bad = run.save()
        shutil.rmtree(served.path)
        Path(bad.path, "dense.safetensors").unlink()
        with pytest.raises(DamagedError):
            follower.poll()
        assert follower.poll() is None and current(bundle).model_version.startswith("3-")


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        run.train()
        run.model.vectors.assign("user", [2**33], torch.full((1, 3), torch.nan))
        run.save(delta=True)
        with pytest.raises(BundleError, match="Table 'vectors.user' has a row with a number"):
            follower.poll()
        run.model.vectors.assign("user", [2**33], torch.zeros(1, 3))
        with torch.no_grad():
            run.model.scale.fill_(torch.inf)
        run.step += 1
        run.save()
        with pytest.raises(BundleError, match="'scale' has a number that is not finite"):
            follower.poll()
        assert current(bundle).number == 0


class Wider(Model):
    def __init__(self) -> None:
        super().__init__(width=5)


class Deeper(Model):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(1, 1)


class OtherTables(Model):
    def __init__(self) -> None:
        super().__init__()
        tables = [hb.Table("item", 5, 60), hb.Table("user", 2, padding_idx=-1)]
        self.vectors = hb.EmbeddingCollection(tables, seed=0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Wider, r"'middle.2.bias' is float32 \(5,\), and float32 \(3,\) in the bundle"),
        (Deeper, r"'more.bias' is float32 \(1,\), and not there in the bundle"),
        (OtherTables, "table 'vectors.item' has dim=5 and rows=60, and dim=4 and rows=60"),
        (torch.nn.Linear, "it has no table 'vectors.item'"),
    ],
)
def test_a_checkpoint_of_another_model(tmp_path: Path, other: Any, told: str) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    made = other(1, 1) if other is torch.nn.Linear else other()
    with Follower(bundle, run.root) as follower:
        hb.save(run.root, made, step=7)
        with pytest.raises(BundleError, match=told):
            follower.poll()
        assert current(bundle).number == 0 and follower.poll() is None
        run.step = 8
        run.save()
        assert applied(follower).step == 8


def test_models_of_hotbed_with_other_arguments(tmp_path: Path) -> None:
    batch = {"dense": torch.rand(4, 13), "user": torch.arange(4), "item": torch.arange(4)}
    model = hb.models.DeepFM(["user", "item"])
    model(batch)
    hb.save(tmp_path / "run", model, step=1)
    bundle = hb.export(model, tmp_path / "bundle", sample=batch, step=1)
    swapped = hb.models.DeepFM(["item", "user"])
    swapped(batch)
    hb.save(tmp_path / "run", swapped, step=2)
    with Follower(bundle, tmp_path / "run") as follower:
        with pytest.raises(BundleError, match="tables of deepfm differs"):
            follower.poll()
        model(batch)
        hb.save(tmp_path / "run", model, step=3)
        assert applied(follower).step == 3


def test_one_follower_at_a_time(tmp_path: Path) -> None:
    run = Run(tmp_path)
    bundle = run.export()
    with Follower(bundle, run.root):
        with pytest.raises(BundleError, match="Another process follows"):
            Follower(bundle, run.root)
    Follower(bundle, run.root).close()


def test_another_follows_when_the_folder_was_removed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    run.train()
    run.save(delta=True)
    with Follower(bundle, run.root) as follower:
        shutil.rmtree(bundle / "versions")
        with Follower(bundle, run.root):
            for _ in range(2):
                with pytest.raises(BundleError, match="Another process follows"):
                    follower.poll()
        assert applied(follower).step == run.step


def test_wrong_arguments(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saved = run.save()
    bundle = run.export()
    with pytest.raises(BundleError, match="is no bundle"):
        Follower(tmp_path, run.root)
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        Follower(bundle, saved.path)
    for name in ("keep", "most_layers"):
        with pytest.raises(BundleError, match=f"{name} must be"):
            Follower(bundle, run.root, **{name: 0})
    about = json.loads((bundle / "bundle.json").read_text())
    reseal(bundle / "bundle.json", {k: v for k, v in about.items() if k != "parameters"})
    with pytest.raises(BundleError, match="an earlier Hotbed has exported it"):
        Follower(bundle, run.root)


def test_follow_reports_and_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    stop, lines, grew = threading.Event(), list[str](), threading.Semaphore(0)

    def report(line: str) -> None:
        lines.append(line)
        grew.release()

    options: dict[str, Any] = {"every": 0.01, "stop": stop, "report": report}
    thread = threading.Thread(target=follow, args=(bundle, run.root), kwargs=options)
    thread.start()
    try:
        run.train()
        run.save(delta=True)
        assert grew.acquire(timeout=60) and "of step 2" in lines[0]
        run.train()
        hb.save(run.root, torch.nn.Linear(1, 1), step=3)
        assert grew.acquire(timeout=60) and "of another model" in lines[1]
        run.train()
        run.save()
        assert grew.acquire(timeout=60) and "of step 4" in lines[2]
    finally:
        stop.set()
        thread.join()
    assert len(lines) == 3
    check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_an_error_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which a version is written has another name at each try."""
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    run.train()
    run.save(delta=True)
    stop, lines, tries = threading.Event(), list[str](), list[str]()

    def full(folder: str, *_: Any) -> Any:
        tries.append(folder)
        if len(tries) == 3:
            stop.set()
        raise OSError(28, "No space left on device", os.path.join(folder, "tables"))

    monkeypatch.setattr("hotbed.serve.following.new_version.files_in", full)
    follow(bundle, run.root, every=0.01, stop=stop, report=lines.append)
    assert len({*tries}) == 3
    assert len(lines) == 1 and "No space left on device" in lines[0] and tries[0] in lines[0]
