"""Checkpoints of tables on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device.placed import moved, to_device, to_host
from kept_in import collection

import hotbed as hb
from hotbed.checkpoint import CheckpointError


def bare() -> Any:
    tables = [hb.Table("item", 4, rows=60), hb.Table("other", 3, rows=9)]
    return hb.EmbeddingCollection(tables, seed=1)


def made(**options: Any) -> tuple[Any, Any]:
    model = bare()
    return model, hb.optim.Adam(model.parameters(), lr=0.1, **options)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        drawn = torch.Generator().manual_seed(step)
        batch = {"item": torch.randint(0, 60, (5, 2), generator=drawn).to(model.device)}
        batch["other"] = batch["item"] % 9
        sum(v.sin().sum() for v in model(batch).values()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_to_a_device_and_back(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer, range(3))
    hb.save(tmp_path / "host", model, optimizer, step=3)
    there, stepped = made()
    to_device(there)
    train(there, stepped, range(7, 9))
    hb.load(tmp_path / "host", there, stepped)
    hb.save(tmp_path / "device", there, stepped, step=3)
    back, again = made()
    hb.load(tmp_path / "device", back, again)
    for trained, by in ((model, optimizer), (back, again)):
        train(trained, by, range(3, 5))
    for name in ("item", "other"):
        assert torch.equal(back.rows(name).values, model.rows(name).values)


def test_rows_that_are_behind_do_not_come_to_a_device(tmp_path: Path) -> None:
    model, optimizer = made(untouched="exact")
    train(model, optimizer, range(3))
    hb.save(tmp_path / "run", model, optimizer, step=3)
    there = to_device(bare())
    with pytest.raises(CheckpointError, match="only the CPU makes up for. Load the model there"):
        hb.load(tmp_path / "run", there)
    hb.load(tmp_path / "run", to_host(there))
    found = to_device(there).lookup("item", torch.arange(60))
    assert torch.equal(found.cpu(), model.rows("item").values)


TABLE = hb.Table("t", 4, rows=40)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kept", ["memory", "ssd"])
def test_rows_that_were_not_saved_are_as_if_no_step_had_touched_them(
    tmp_path: Path, kept: str, given: bool
) -> None:
    """Their states, too: of a table in tiers only rows that were touched are saved."""
    model = collection(kept, tmp_path, TABLE)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    model({"t": torch.arange(8)})["t"].sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    # States of tables lie with their rows, also where no optimizer is given.
    saved = hb.save(tmp_path / "run", model, optimizer if given else None, step=1)
    assert saved.rows == (40 if kept == "memory" else 8)
    other = to_device(collection("memory", tmp_path, TABLE))
    its_optimizer = hb.optim.Adagrad(other.parameters(), lr=0.1, initial_accumulator_value=0.5)
    for _ in range(3):
        other(moved({"t": torch.arange(4, 40)}))["t"].sin().sum().backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    found = hb.load(tmp_path / "run", other, its_optimizer, strict=given)
    assert found.missing == ([] if given else ["optimizers"])
    sums = its_optimizer.state_dict()["state"][0]["sum"].cpu()
    assert (sums[:8] > 0.5).all() and (sums[8:] == 0.5).all()
    ids = torch.arange(40)
    assert torch.equal(other.rows("t").values.cpu(), model.lookup("t", ids))
