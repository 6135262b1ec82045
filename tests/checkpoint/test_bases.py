"""Bases of checkpoints that hold what has changed: which there are, and what becomes of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.grown_runs import assert_reads_as, grown, loaded
from checkpoint.saved_models import MANIFEST, replace_file, rewrite
from checkpoint.small_models import made, train
from safetensors.torch import save_file

import hotbed as hb
import hotbed.checkpoint.inspect
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.manifest import read_manifest


def test_a_chain_is_merged_into_one_that_is_whole(tmp_path: Path) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 4, delta=True)
    told: list[int] = []
    whole = hb.checkpoint.merge(tmp_path / "run", tmp_path / "whole", progress=told.append)
    shutil.rmtree(tmp_path / "run")
    assert sum(told) > 0
    assert hb.checkpoint.inspect.contents(whole)["base"] is None
    assert [fault for *_, fault in hb.checkpoint.inspect.verified(whole) if fault] == []
    assert_reads_as(whole, model, optimizer, "Adam")
    assert saves[-1].base is not None


def test_bases_stay_as_long_as_they_are_needed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optimizer, _ = grown(run, 4, delta=True, keep=1)
    assert len(os.listdir(run)) == 4
    assert_reads_as(run, model, optimizer, "Adam")
    hb.save(run, model, optimizer, step=4, keep=2)
    assert len(os.listdir(run)) == 5
    hb.save(run, model, optimizer, step=5, keep=2)
    assert sorted(os.listdir(run)) == ["step-000000000004", "step-000000000005"]


def test_one_of_so_many_is_whole(tmp_path: Path) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 7, delta=3)
    assert [bool(one.base) for one in saves] == [False, True, True] * 2 + [False]
    other, its_optimizer = loaded(saves[4].path)  # a process that goes on
    train(other, its_optimizer, range(9))
    saved = hb.save(tmp_path / "run", other, its_optimizer, step=7, base=saves[4].path)
    assert saved.base == saves[4].path
    assert_reads_as(tmp_path / "run", other, its_optimizer, "Adam")


def test_what_is_not_known_is_saved_whole_or_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optimizer, saves = grown(run, 2)
    other, its_optimizer = made("memory", tmp_path, "Adam")
    train(other, its_optimizer, range(2))
    assert hb.save(run, other, its_optimizer, step=2, delta=True).base is None
    with pytest.raises(
        CheckpointError, match="'embeddings.item': it is not known what has changed"
    ):
        hb.save(run, other, its_optimizer, step=3, base=saves[0].path)
    saved = hb.save(run, model, optimizer, step=3, base=saves[0].path)
    assert saved.base == saves[0].path
    again = hb.optim.SGD(model.parameters(), lr=0.1, replace_state=True)
    assert hb.save(run, model, again, step=4, delta=True).base is None
    with pytest.raises(CheckpointError, match="it does not lie in"):
        hb.save(tmp_path / "elsewhere", model, again, step=5, base=saves[0].path)
    with pytest.raises(CheckpointError, match="There is no"):
        hb.save(run, model, again, step=5, base=tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="delta must be an integer from 1 on"):
        hb.save(run, model, again, step=5, delta=0.5)
    with pytest.raises(CheckpointError, match="delta must be an integer from 1 on"):
        hb.save(run, model, again, step=5, delta=0)


def test_a_base_that_is_gone_or_another_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optimizer, saves = grown(run, 3, delta=True)
    first, second, third = (Path(one.path) for one in saves)
    hb.save(tmp_path / "elsewhere", model, optimizer, step=0)
    os.rename(first, tmp_path / "kept")
    with pytest.raises(
        CheckpointError, match=f"has changed since {first.name}, which cannot be read"
    ):
        hb.load(run, model, optimizer)
    assert [one.state for one in hb.checkpoint.list(run)] == ["damaged"] * 2
    os.rename(tmp_path / "elsewhere" / first.name, first)
    with pytest.raises(CheckpointError, match="another checkpoint is there now"):
        hb.load(run, model, optimizer)
    shutil.rmtree(first)
    os.rename(tmp_path / "kept", first)
    (second / "rows-0-0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{second.name}/rows-0-0.safetensors has 0 bytes"):
        hb.load(third, model, optimizer)
    assert [one.state for one in hb.checkpoint.list(run)] == ["whole", "damaged", "damaged"]
    assert hb.load(first, *made("memory", tmp_path, "Adam")).step == 0


def test_tables_that_a_base_has_not_are_whole(tmp_path: Path) -> None:
    def tables(*names: str) -> Any:
        return hb.EmbeddingCollection([hb.Table(name, 2) for name in names], seed=0)

    model = tables("a")
    model.assign("a", [1, 2], torch.ones(2, 2))
    hb.save(tmp_path, model, step=0)
    larger = tables("a", "b")
    hb.load(tmp_path, larger, strict=False)
    larger.assign("a", [3], torch.ones(1, 2))
    larger.assign("b", [4, 5], torch.ones(2, 2))
    saved = hb.save(tmp_path, larger, step=1, delta=True)
    tables_saved = hb.checkpoint.inspect.contents(saved.path)["tables"]
    assert [(o["table"], o["saved_rows"], o["removed"]) for o in tables_saved] == [
        ("a", 1, 0),
        ("b", 2, None),
    ]
    hb.load(tmp_path, other := tables("a", "b"))
    assert [other.rows(name).ids.tolist() for name in ("a", "b")] == [[1, 2, 3], [4, 5]]
    with pytest.raises(CheckpointError, match="Table 'b': it is not known what has changed"):
        hb.save(tmp_path, larger, step=2, base=tmp_path / "step-000000000000")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["tables"]["embeddings.item"].update(dtype="float16"), "item' are others"),
        (lambda m: m["tables"]["embeddings.item"]["rule"].update(name="SGD"), "item' are others"),
        (lambda m: m["tables"].pop("embeddings.item"), "has rows of 'embeddings.item'"),
        (lambda m: m.update(uid=32 * "0"), "another checkpoint is there now"),
    ],
)
def test_bases_that_somebody_has_changed(tmp_path: Path, change: Any, says: str) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 2, delta=True)
    rewrite(Path(saves[0].path), change)
    with pytest.raises(CheckpointError, match=says):
        hb.load(saves[1].path, model, optimizer)


def test_a_chain_that_goes_round_is_damaged(tmp_path: Path) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 2, delta=True)
    first, second = (Path(one.path) for one in saves)
    uid = json.loads((second / MANIFEST).read_text())["uid"]
    rewrite(first, lambda m: m.update(base={"name": second.name, "uid": uid}))
    with pytest.raises(CheckpointError, match="is a base of itself"):
        hb.load(second, model, optimizer)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([5, 6], dtype=torch.int32), "has no ids of"),
        (torch.tensor([[5], [6]]), "has no ids of"),
        (torch.tensor([5]), "has 1 removed ids of 'embeddings.user', and tells of 2"),
    ],
)
def test_removed_ids_of_others(tmp_path: Path, ids: torch.Tensor, says: str) -> None:
    model, optimizer, _ = grown(tmp_path / "run", 2)
    model.embeddings.erase("user", model.embeddings.rows("user").ids[:2])
    saved = hb.save(tmp_path / "run", model, optimizer, step=2, delta=True)
    name = "removed-0.safetensors"
    save_file({"embeddings.user": ids}, tmp_path / name)
    replace_file(Path(saved.path), name, (tmp_path / name).read_bytes())
    with pytest.raises(CheckpointError, match=says):
        hb.load(saved.path, model, optimizer)
    assert any(fault for *_, fault in hb.checkpoint.inspect.verified(saved.path))


def test_what_needs_a_damaged_one_is_not_named_as_whole(tmp_path: Path) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 2)
    for number in (2, 3):
        train(model, optimizer, range(1))
        hb.save(tmp_path / "run", model, optimizer, step=number, delta=True)
    rows = Path(saves[1].path, "rows-0-0.safetensors")
    rows.write_bytes(rows.read_bytes()[:-1] + b"x")
    with pytest.raises(hb.checkpoint.DamagedError) as error:
        hb.load(tmp_path / "run", model, optimizer)
    assert error.value.others == [saves[0].path]
    hb.load(saves[0].path, model, optimizer)


def test_odd_arguments(tmp_path: Path) -> None:
    model, optimizer, _ = grown(tmp_path / "run", 1)
    for name in ("a\ud800b", ""):
        with pytest.raises(CheckpointError, match="path"):
            hb.save(name, model, optimizer, step=1)
        with pytest.raises(CheckpointError, match="path"):
            hb.load(name, model, optimizer)
    with pytest.raises(CheckpointError, match="strict must be True or False"):
        hb.load(tmp_path / "run", model, optimizer, strict="no")


def test_a_renamed_one_keeps_its_bases(tmp_path: Path) -> None:
    model, optimizer, saves = grown(tmp_path / "run", 3, delta=True)
    os.rename(saves[1].path, tmp_path / "run" / "best")
    os.rename(saves[2].path, tmp_path / "run" / "later")
    hb.save(tmp_path / "run", model, optimizer, step=3, keep=1)
    assert os.path.isdir(saves[0].path)
    hb.load(tmp_path / "run" / "best", model, optimizer)


def test_long_chains_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = grown(tmp_path / "run", 30, delta=True, keep=2)
    read: list[str] = []

    def counted(folder: str) -> Any:
        read.append(folder)
        return read_manifest(folder)

    monkeypatch.setattr("hotbed.checkpoint.chain.read_manifest", counted)
    assert [one.state for one in hb.checkpoint.list(tmp_path / "run")] == ["whole"] * 30
    assert len(read) == 30
    read.clear()
    hb.save(tmp_path / "run", model, optimizer, step=30, delta=True, keep=2)
    assert len(read) < 5 * 30
