"""A bundle that follows a run serves what a new export of its latest checkpoint would."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.followed_runs import (
    USERS,
    B,
    Run,
    answers,
    applied,
    batch_of,
    check_rows_and_weights,
    initialisers,
    reseal,
    rows_in,
    served_from,
)

import hotbed as hb
from hotbed.checkpoint import DamagedError
from hotbed.serve.bundles.dense_weights import dense_of, with_weights
from hotbed.serve.bundles.manifests import read_bundle
from hotbed.serve.bundles.versions import open_layers, versions_of
from hotbed.serve.exporting.export import Origin, export_checkpoint
from hotbed.serve.following.follower import Follower
from hotbed.table.live import live_table

READER = Path(__file__).resolve().parents[2] / "examples" / "serve" / "read_bundle.py"


@pytest.mark.parametrize("rows", ["float32", "float16", "int8", "int4"])
def test_a_version_answers_as_a_new_export(tmp_path: Path, rows: str) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export(rows=rows)
    first = rows_in(served_from(bundle).tables)
    with Follower(bundle, run.root) as follower:
        assert follower.poll() is None  # it serves that one
        for delta in (True, False, True):
            run.train(2)
            run.erase({run.step, 7, 8})
            saved = run.save(delta=delta)
            assert bool(saved.base) == delta
            found = applied(follower)
            assert found.step == run.step and 0 < found.rows <= 100
            served = served_from(bundle)
            assert served.version == found.version == versions_of(bundle)[-1]
            check_rows_and_weights(served, run.loaded(), tmp_path / "expected", rows)
            hb.export(run.loaded(), tmp_path / "new", sample=batch_of(0), rows=rows)
            new = served_from(tmp_path / "new")
            assert initialisers(served.dense) == initialisers(new.dense)
            batch = batch_of(run.step)
            np.testing.assert_array_equal(answers(served, batch), answers(new, batch))
            assert follower.poll() is None
    base = versions_of(bundle)[0]
    assert base.folder == str(bundle) and base.number == 0
    for stem, before in first.items():  # the bundle is as it was
        now = rows_in(open_layers(bundle, base).tables)[stem]
        np.testing.assert_array_equal(now, before)


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("place", ["memory", "ssd"])
@pytest.mark.parametrize("rule", ["Adam", "SGD"])
def test_rules_and_places(tmp_path: Path, place: str, untouched: str, rule: str) -> None:
    """Rows that no batch touches move with "exact"; tiers save no rows of static tables that none touched."""
    decay = {} if rule == "Adam" else {"momentum": 0.9, "weight_decay": 0.1}
    run = Run(tmp_path, place=place, rule=rule, untouched=untouched, **decay)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        for delta in (True, False, True):
            run.train(2)
            run.erase({3, 4, run.step})
            run.save(delta=delta)
            applied(follower)
            check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("place", ["memory", "ssd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_other_dtypes(
    tmp_path: Path, place: str, untouched: str, dtype: torch.dtype
) -> None:
    run = Run(tmp_path, place=place, untouched=untouched, about={"dtype": dtype})
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        for delta in (True, False):
            run.train(2)
            run.erase({3, 4, run.step})
            run.save(delta=delta)
            applied(follower)
            check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_a_table_that_was_empty(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.erase({*range(USERS)})
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        for delta in (True, False):
            run.train(2)
            run.save(delta=delta)
            applied(follower)
            check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_linked_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path, place="ssd")
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        for linked in (True, False, True):
            run.train(2)
            run.erase({3, run.step})
            run.save(linked=linked, delta=not linked)
            applied(follower)
            check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


@pytest.mark.parametrize("name", [*hb.models.MODELS])
def test_no_weight_is_part_of_a_constant(tmp_path: Path, name: str) -> None:
    """With other weights, the dense part answers as the model does."""
    batch = {"dense": torch.rand(B, 13), "user": torch.arange(B), "item": torch.arange(B)}
    if name == "din":
        item, names = hb.Table("item", 16, combiner=None, padding_idx=-1), ("item", "history")
        features = {**dict.fromkeys(names, "item"), "user": "user"}
        model = hb.models.DIN([item, "user"], features=features)
        batch["history"] = torch.arange(B * 3).reshape(B, 3)
        del batch["dense"]
    else:
        model = hb.models.MODELS[name](["user", "item"])
    model(batch)
    bundle = hb.export(model, tmp_path / "bundle", sample=batch)
    with torch.no_grad():
        for each in [*model.parameters(), *model.buffers()]:
            if each.is_floating_point() and live_table(each) is None:
                each.add_(torch.rand(each.shape))
    about = read_bundle(str(bundle))
    state = dense_of(model)
    (tmp_path / "bundle" / "dense.onnx").write_bytes(
        with_weights("", (bundle / "dense.onnx").read_bytes(), about["parameters"], state)
    )
    read = runpy.run_path(str(READER))["Bundle"](bundle)
    with torch.no_grad():
        expected = model.eval()(batch)
    answered = read.predict({name: each.tolist() for name, each in batch.items()})
    if isinstance(expected, torch.Tensor):
        expected = {"output": expected}
    for (_, answer), wanted in zip(answered.items(), expected.values(), strict=True):
        np.testing.assert_allclose(answer, wanted.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("known", ["checkpoint", "step", "nothing"])
def test_what_a_bundle_was_exported_from(tmp_path: Path, known: str) -> None:
    """With it only changed rows are read; without it rows are compared."""
    run = Run(tmp_path)
    run.train(5)
    first = run.save()
    bundle = run.export(step=run.step if known == "step" else None)
    if known == "checkpoint":
        about = json.loads((bundle / "bundle.json").read_text())
        uid = json.loads(Path(first.path, "checkpoint.json").read_text())["uid"]
        reseal(bundle / "bundle.json", {**about, "checkpoint": uid})
    run.train()
    second = run.save(delta=True)
    # Rows of its base are not read where it is known that they are served.
    rows = Path(first.path, "rows-0-0.safetensors")
    contents = rows.read_bytes()
    rows.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    with Follower(bundle, run.root) as follower:
        if known == "nothing":
            with pytest.raises(DamagedError):
                follower.poll()
            rows.write_bytes(contents)
            follower.close()
            follower = Follower(bundle, run.root)
        found = applied(follower)
        follower.close()
    rows.write_bytes(contents)
    assert found.rows <= 40 and found.step == second.step  # and not all that there are
    check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_an_exported_checkpoint_is_known(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saved = run.save()
    uid = json.loads(Path(saved.path, "checkpoint.json").read_text())["uid"]
    origin = Origin(step=run.step, checkpoint=uid)
    bundle = export_checkpoint(run.loaded(), tmp_path / "b", sample=batch_of(0), origin=origin)
    with Follower(bundle, run.root) as follower:
        assert follower.poll() is None


def test_a_run_that_is_not_there_yet_and_one_that_went_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        assert follower.poll() is None
        early = run.save()
        assert follower.poll() is None  # of the step that was exported
        run.train(3)
        run.save(delta=True)
        assert applied(follower).step == run.step
        hb.load(early.path, run.model, run.optimizer)
        run.step = early.step
        run.train()
        run.save(delta=True)
        assert applied(follower).step == run.step
        check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")
        run.train()
        run.save(delta=True)
        run.save(delta=True)
        shutil.rmtree(run.root)  # it begins anew
        other = Run(tmp_path)
        other.save()
        assert applied(follower).step == 1
        check_rows_and_weights(served_from(bundle), other.loaded(), tmp_path / "expected")


def test_pruned_runs(tmp_path: Path) -> None:
    """The checkpoint that is served is gone when the next one is there."""
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        for _ in range(3):
            run.train(2)
            run.erase({run.step})
            run.save()
            run.train()
            run.save(keep=1)
            assert len(os.listdir(run.root)) == 1
            assert applied(follower).step == run.step
            check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_ids_that_were_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    wanted = [2**33, 5 * 2**33, 6 * 2**33, 49 * 2**33]
    bundle = run.export(tables={"vectors.user": wanted})
    with Follower(bundle, run.root) as follower:
        for delta in (True, False):
            run.train(9)
            run.save(delta=delta)
            applied(follower)
            rows = served_from(bundle).tables["vectors.user"].rows(np.arange(50) * 2**33)
            assert {*np.flatnonzero(rows.any(1))} <= {1, 5, 6, 49} and rows[[1, 5, 6]].any(1).all()


def test_object_storage(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    run = Run(tmp_path, root=f"memory://followed-{os.getpid()}")
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        assert follower.poll() is None
        for delta in (True, True, False):
            run.train()
            run.erase({run.step})
            run.save(delta=delta, keep=2)
            assert applied(follower).step == run.step
            check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


def test_folders_of_others_beside_versions_stay(tmp_path: Path) -> None:
    run = Run(tmp_path)
    bundle = run.export()
    own, left_over = bundle / "versions" / "mine", bundle / "versions" / "1-00000000"
    own.mkdir(parents=True)
    (own / "notes.txt").write_text("mine")
    (left_over / "00000001.2-00000000").mkdir(parents=True)
    with Follower(bundle, run.root):
        assert (own / "notes.txt").read_text() == "mine"
        assert not left_over.exists()


def test_a_bundle_that_is_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root) as follower:
        run.train()
        run.save(delta=True)
        old = applied(follower).version
        run.train()
        run.save(delta=True)
        os.makedirs(bundle.parent / "kept")
        shutil.copytree(bundle / "versions", bundle.parent / "kept" / "versions")
        run.export()
        shutil.copytree(bundle.parent / "kept" / "versions", bundle / "versions")  # left-overs
        assert [each.number for each in versions_of(bundle)] == [0]
        assert follower.poll() is None
        assert old.base not in os.listdir(bundle / "versions")
        run.train()
        run.save(delta=True)
        assert applied(follower).version.base != old.base
        check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")


@pytest.mark.parametrize("most_layers", [1, 8])
@pytest.mark.parametrize("gone", ["version", "file", "all"])
def test_versions_that_somebody_removes(tmp_path: Path, gone: str, most_layers: int) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    with Follower(bundle, run.root, most_layers=most_layers) as follower:
        for _ in range(2):
            run.train()
            run.save(delta=True)
            newest = Path(applied(follower).version.folder)
        follower.wait_for_merges()
        if gone == "file":
            next(newest.glob("tables/*.rows.npy")).unlink()
        else:
            shutil.rmtree(newest if gone == "version" else newest.parent)
        if gone == "version":
            assert applied(follower).step == run.step  # as a new follower would
            assert follower.poll() is None
        run.train()
        run.save(delta=True)
        assert applied(follower).step == run.step
        check_rows_and_weights(served_from(bundle), run.loaded(), tmp_path / "expected")
        with pytest.raises(hb.serve.BundleError, match="Another process follows"):
            Follower(bundle, run.root)  # the lock is that of the new folder


ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 3)),
    st.tuples(st.just("erase"), st.sets(st.integers(0, 39), min_size=1, max_size=9)),
    st.tuples(st.just("save"), st.sampled_from(["delta", "whole", "prune"])),
    st.tuples(st.just("save"), st.sampled_from(["delta"])),
    st.tuples(st.just("load"), st.integers(0, 3)),
    st.tuples(st.just("follow"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
)


@settings(max_examples=examples(4), deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=3, max_size=25),
    form=st.sampled_from([("float32", "zeros"), ("float32", "first"), ("int8", "zeros")]),
    untouched=st.sampled_from(["lazy", "exact"]),
    place=st.sampled_from(["memory", "ssd"]),
)
def test_any_training(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[tuple[str, Any]],
    form: tuple[str, str],
    untouched: str,
    place: str,
) -> None:
    rows, default = form
    folder = tmp_path_factory.mktemp("followed")
    run = Run(folder, place=place, untouched=untouched)
    run.save()
    bundle = run.export(rows=rows, default=default)
    with Follower(bundle, run.root, most_layers=2) as follower:
        for what, value in [*actions, ("save", "delta"), ("follow", 0)]:
            if what == "train":
                run.train(value)
            elif what == "erase":
                run.erase(value)
            elif what == "save":
                run.step += 1
                run.save(delta=value == "delta", keep=1 if value == "prune" else None)
            elif what == "load":
                there = hb.checkpoint.list(run.root)
                chosen = there[-1 - value % len(there)]
                hb.load(chosen.path, run.model, run.optimizer)
                run.step = chosen.step or 0
            elif what == "restart":
                follower.close()
                follower = Follower(bundle, run.root, most_layers=2)
            else:
                follower.poll()
                assert follower.poll() is None
                follower.wait_for_merges()
                now = run.loaded(), folder / "expected", rows, default
                check_rows_and_weights(served_from(bundle), *now)
        follower.close()
