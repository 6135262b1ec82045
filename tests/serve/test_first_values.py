"""Ids without row that read first values, as in training."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from serve.followed_runs import (
    Model,
    Run,
    answers,
    applied,
    batch_of,
    check_rows_and_weights,
    reseal,
    served_from,
)

import hotbed as hb
from hotbed.serve import BundleError, ExportError
from hotbed.serve.bundles.row_formats import ROW_FORMATS
from hotbed.serve.following.follower import Follower
from hotbed.table.live import live_table

READER = Path(__file__).resolve().parents[2] / "examples" / "serve" / "read_bundle.py"
USER = "vectors.user"
NEW = np.arange(100, 140) * 2**33
"""Ids that no batch has."""


def trained_rows(run: Run, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    found = run.model.vectors.lookup("user", torch.from_numpy(ids)).detach().float()
    return np.asarray(found)


def asked_of_new() -> dict[str, torch.Tensor]:
    batch = batch_of(1)
    batch["user"][:, 1] = torch.from_numpy(NEW[: len(batch["user"])])
    return batch


@pytest.mark.parametrize("rows", [*ROW_FORMATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bundle_answers_as_the_model(tmp_path: Path, rows: str, dtype: torch.dtype) -> None:
    run = Run(tmp_path, about={"dtype": dtype})
    bundle = run.export(rows=rows, default="first")
    served = served_from(bundle)
    read = served.tables[USER].rows(NEW)
    np.testing.assert_array_equal(read, trained_rows(run, NEW))
    assert read.any(1).all() and len({*map(bytes, read)}) == len(NEW)
    batch = asked_of_new()
    with torch.no_grad():
        expected = run.model.eval()(batch).numpy()
    close = 1e-5 if rows == "float32" else 0.1
    np.testing.assert_allclose(answers(served, batch), expected, atol=close)
    files = {each["name"] for each in served.about["files"]}
    of_user = served.about["tables"][USER]["files"]
    assert f"{of_user}.default.npy" not in files and f"{of_user}.rows.npy" in files


def test_ids_that_were_not_exported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    one, other = np.array([1]) * 2**33, np.array([2]) * 2**33
    run.model.vectors.assign("user", torch.from_numpy(other), torch.ones(1, 3))
    bundle = run.export(tables={USER: one}, default="first")
    table = served_from(bundle).tables[USER]
    np.testing.assert_array_equal(table.rows(one), trained_rows(run, one))
    untrained = Model().vectors.lookup("user", torch.from_numpy(other))
    np.testing.assert_array_equal(table.rows(other), untrained.detach().numpy())


def test_versions(tmp_path: Path) -> None:
    """Also where layers are merged, and rows go."""
    run = Run(tmp_path)
    run.save()
    bundle = run.export(default="first")
    with Follower(bundle, run.root, most_layers=2) as follower:
        for delta in (True, False, True, True, True):
            run.train(2)
            run.erase({run.step, 7, 8})
            run.save(delta=delta)
            applied(follower)
            served = served_from(bundle)
            check_rows_and_weights(served, run.loaded(), tmp_path / "expected", default="first")
            np.testing.assert_array_equal(served.tables[USER].rows(NEW), trained_rows(run, NEW))
            follower.wait_for_merges()


@pytest.mark.parametrize("default", ["mean", "first"])
def test_rows_that_go_are_stored_in_few_bits(tmp_path: Path, default: str) -> None:
    run = Run(tmp_path)
    run.save()
    bundle = run.export(rows="int8", default=default)
    before = served_from(bundle).tables[USER]
    gone = np.array([number for number in range(40) if number % 3]) * 2**33
    there = np.isin(gone, np.asarray(before.layers[0].ids))
    for delta in (True, False):
        with Follower(bundle, run.root) as follower:
            run.erase({number for number in range(40) if number % 3})
            run.train()
            run.erase({number for number in range(40) if number % 3})
            run.save(delta=delta)
            assert applied(follower).rows
        table = served_from(bundle).tables[USER]
        exact = before.layers[0].default.rows(gone)
        assert there.any() and not there.all()
        found = table.rows(gone)
        np.testing.assert_array_equal(found[~there], exact[~there])
        step = np.ptp(exact, axis=1, keepdims=True) / 255
        assert (np.abs(found - exact) <= step / 2 + 1e-7).all()


@pytest.mark.parametrize("own", [False, True])
def test_another_training_is_refused(tmp_path: Path, own: bool) -> None:
    """Its rows would start from others."""

    class Own:
        def resolve(self, rows: int | None, dim: int) -> hb.init.Distribution:
            return hb.init.Distribution(hb.init.Kind.normal, 0.0, 1.0)

    run = Run(tmp_path, about={"init": Own()} if own else None)
    run.save()
    bundle, other = run.export(default="first"), run.export("other")
    run.train()
    with Follower(bundle, run.root) as follower:
        run.save()
        assert applied(follower).step == run.step
    for handle in run.model.vectors.parameters():
        live = live_table(handle)
        assert live is not None
        live.set_key(live.key + 1)
    run.train()
    run.save()
    with Follower(bundle, run.root) as follower:
        with pytest.raises(BundleError, match=f"table '{USER}' has other first values"):
            follower.poll()
    with Follower(other, run.root) as follower:
        assert applied(follower).step == run.step


@pytest.mark.parametrize("about", [{"dtype": torch.bfloat16}, {"init": hb.init.Normal(0.0, 0.02)}])
def test_other_first_values_are_refused(tmp_path: Path, about: dict[str, Any]) -> None:
    run = Run(tmp_path)
    bundle = run.export(default="first")
    other = Run(tmp_path / "other", about=about)
    other.train()
    other.save()
    with Follower(bundle, other.root) as follower:
        with pytest.raises(BundleError, match="has other first values"):
            follower.poll()


MOVING: list[tuple[str, dict[str, Any], bool]] = [
    ("FTRL", {"l1": 0.5}, True),
    ("SGD", {"weight_decay": 0.1}, True),
    ("Adam", {"weight_decay": 0.5, "decoupled_weight_decay": True}, True),
    ("Adam", {}, False),
    ("SGD", {}, False),
]


@pytest.mark.parametrize("rule, options, moves", MOVING)
def test_steps_that_move_rows_which_no_batch_has_had(
    tmp_path: Path, rule: str, options: dict[str, Any], moves: bool
) -> None:
    """Training reads what they have moved: such tables read no first values, and are not followed."""
    run = Run(tmp_path, rule=rule, untouched="exact", **options)
    untrained = Model().vectors.lookup("user", torch.from_numpy(NEW)).detach().numpy()
    assert (trained_rows(run, NEW) != untrained).any() == moves
    run.save()
    if moves:
        for make in (run.export, lambda default: hb.serve.quantized(run.model, default=default)):
            with pytest.raises(ExportError, match="moves all rows of table 'user'"):
                make(default="first")
    loaded = run.loaded()  # without the optimizer, ids without row read first values again
    bundle = hb.export(loaded, tmp_path / "b", sample=batch_of(0), default="first")
    np.testing.assert_array_equal(served_from(bundle).tables[USER].rows(NEW), untrained)
    run.train()
    run.save()
    with Follower(bundle, run.root) as follower:
        if moves:
            with pytest.raises(BundleError, match=f"moves all rows of table '{USER}'"):
                follower.poll()
        else:
            assert applied(follower).step == run.step


def test_an_initializer_that_is_not_known(tmp_path: Path) -> None:
    """One of a later Hotbed's."""
    run = Run(tmp_path)
    bundles = [run.export(default, default=default) for default in ("first", "zeros")]
    run.train()
    saved = Path(run.save().path)
    about = json.loads((saved / "checkpoint.json").read_text())
    about["tables"][USER]["init"] = {"kind": "Cauchy", "scale": 1.0}
    reseal(saved / "checkpoint.json", about)
    for bundle, told in zip(bundles, ("other first values", "Cauchy.*is unknown"), strict=True):
        with Follower(bundle, run.root) as follower:
            with pytest.raises(hb.HotbedError, match=told):
                follower.poll()


def test_no_memory_for_them(tmp_path: Path) -> None:
    """An error is raised, and not in a thread of the core, which would end the process."""
    program = (
        "import resource, torch, hotbed as hb\n"
        "few = hb.serve.quantized(hb.EmbeddingCollection([hb.Table('u', 256)]), default='first')\n"
        "few({'u': torch.arange(4)})\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096 + (500 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        "try:\n    few({'u': torch.arange(2_000_000)[None]})\n"
        "except MemoryError:\n    print('no memory', few({'u': torch.arange(4)})['u'].shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "no memory torch.Size([4, 256])\n", done.stderr


def test_who_cannot_compute_them_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ExportError, match=f"first values of table '{USER}'"):
        run.export(default="first", standalone=True)
    assert not (tmp_path / "bundle").exists()
    bundle = run.export(default="first")
    with pytest.raises(ValueError, match="Hotbed alone computes first values"):
        runpy.run_path(str(READER))["Bundle"](bundle)
    model = torch.nn.Sequential(hb.Embedding(9, 2), torch.nn.Linear(2, 1))
    ids = torch.arange(4)
    model(ids)
    path = hb.export(model, tmp_path / "static", sample=ids, default="first", standalone=True)
    assert (path / "standalone.onnx").is_file()  # a static table has all rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "no number"},
        {"key": "1" * 17},
        {"dtype": "int8"},
        {"dtype": "no_grad"},
        {"padding_idx": 1.5},
        {"bands": []},
        {"bands": [{"end": 2, "kind": "normal", "numbers": [0, 1, 0, 0]}]},
        {"bands": [{"end": 3, "kind": "gamma", "numbers": [0, 1, 0, 0]}]},
        {"bands": [{"end": 3, "kind": "normal", "numbers": [0, -1, 0, 0]}]},
        {"bands": [{"end": 3, "kind": "normal", "numbers": [0]}]},
        {"bands": [{"end": 3, "kind": "normal"}]},
        {"bands": [{"end": 3, "kind": "normal", "numbers": [0, 10**400, 0, 0]}]},
        {"bands": [{"end": 2**40, "kind": "normal", "numbers": [0, 1, 0, 0]}]},
        {"bands": {}},
    ],
)
def test_damaged_manifests(tmp_path: Path, wrong: dict[str, Any]) -> None:
    bundle = Run(tmp_path).export(default="first")
    about = json.loads((bundle / "bundle.json").read_text())
    about["tables"][USER]["first"].update(wrong)
    reseal(bundle / "bundle.json", about)
    with pytest.raises(BundleError, match="First values of a table"):
        served_from(bundle)
