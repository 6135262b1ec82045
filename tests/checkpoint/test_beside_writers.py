"""Checkpoints that go while they are looked at, a schedule that ended at 0, and steps that are no number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved_models import seal
from typer.testing import CliRunner

import hotbed as hb
from hotbed.checkpoint import folder, listing, manifest
from hotbed.cli.app import app


def saved(folder: Path) -> None:
    model = hb.EmbeddingCollection([hb.Table("a", 4, 21)], seed=1)
    optimizer = hb.optim.Adam(model.parameters())
    for step in range(3):
        model({"a": torch.tensor([1, 2])})["a"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        hb.save(folder, model, optimizer, step=step)


def test_a_checkpoint_that_is_removed_is_left_out_of_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    read = manifest.read_manifest

    def gone(folder: str) -> Any:
        if folder.endswith("1"):
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(listing, "read_manifest", gone)
    assert [one.step for one in hb.checkpoint.list(tmp_path)] == [0, 2]


@pytest.mark.parametrize("asked", ["list", "latest"])
def test_a_list_beside_a_busy_writer_has_the_one_that_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Each of the first two times that one is looked at, the writer has completed another by then."""
    model = hb.EmbeddingCollection([hb.Table("a", 4, 21)], seed=1)
    hb.save(tmp_path, model, step=0)
    look = folder.is_complete
    steps = iter((1, 2))

    def late(path: str) -> bool:
        if path != str(tmp_path) and (step := next(steps, None)) is not None:
            monkeypatch.undo()
            hb.save(tmp_path, model, step=step, keep=1)
            patch()
        return look(path)

    def patch() -> None:
        for module in (folder, listing):
            monkeypatch.setattr(module, "is_complete", late)

    patch()
    if asked == "list":
        assert [one.step for one in hb.checkpoint.list(tmp_path)] == [2]
    else:
        assert str(hb.checkpoint.latest(tmp_path)).endswith("2")


def test_verify_goes_on_where_one_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    found = listing.list(tmp_path)
    shutil.rmtree(found[0].path)
    monkeypatch.setattr(listing, "list", lambda path: found)
    result = CliRunner().invoke(app, ["checkpoint", "verify", "--all", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "was removed meanwhile" in result.output and result.output.count("is whole") == 2


@pytest.mark.parametrize("steps", ["3", -1, True, None, 2.5])
def test_steps_that_are_no_number(tmp_path: Path, steps: Any) -> None:
    saved(tmp_path)
    folder = Path(hb.checkpoint.list(tmp_path)[-1].path)
    contents = json.loads((folder / "checkpoint.json").read_text())
    contents["tables"]["a"]["rule"]["steps"] = steps
    seal(folder / "checkpoint.json", contents)
    model = hb.EmbeddingCollection([hb.Table("a", 4, 21)])
    with pytest.raises(
        hb.checkpoint.CheckpointError, match="what it says of table 'a' is incomplete"
    ):
        hb.load(folder, model)
    for command in (
        ["checkpoint", "verify"],
        ["checkpoint", "show"],
        ["dump", "--to", tmp_path / "x"],
    ):
        result = CliRunner().invoke(app, [*map(str, command), str(folder)])
        assert result.exit_code and "Traceback" not in result.output, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_schedule_that_ended_at_no_learning_rate(tmp_path: Path) -> None:
    def made() -> tuple[Any, Any, Any]:
        model = hb.EmbeddingCollection([hb.Table("a", 4, 21)], seed=1)
        optimizer = hb.optim.FTRL(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)

    def train(model: Any, optimizer: Any) -> None:
        model({"a": torch.tensor([1, 2])})["a"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, schedule = made()
    for _ in range(3):
        train(model, optimizer)
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0
    hb.save(tmp_path, model, optimizer, step=3, scheduler=schedule)
    other, of_other, its_schedule = made()
    hb.load(tmp_path, other, of_other, scheduler=its_schedule)
    with pytest.raises(hb.OptimizerError, match="lr of group 0 is 0.0"):
        train(other, of_other)
    for one in (optimizer, of_other):
        one.zero_grad()
        one.param_groups[0]["lr"] = 0.05
    train(model, optimizer)
    train(other, of_other)
    assert torch.equal(model.lookup("a", torch.arange(21)), other.lookup("a", torch.arange(21)))
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = -1.0
    with pytest.raises(hb.OptimizerError, match="outside"):
        optimizer.load_state_dict(state)
