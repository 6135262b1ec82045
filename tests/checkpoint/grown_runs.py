"""Runs that are saved again and again, and what is loaded of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from checkpoint.small_models import everything, made, same, train

import hotbed as hb
import hotbed.checkpoint.inspect


def loaded(run: Path | str, rule: str = "Adam", place: str = "memory", **options: Any) -> Any:
    """(model, optimizer) with what a checkpoint has."""
    model, optimizer = made(place, Path(tempfile.mkdtemp(dir=Path(run).parent)), rule, **options)
    train(model, optimizer, range(100, 102))  # what is to be forgotten
    hb.load(run, model, optimizer)
    return model, optimizer


def assert_reads_as(run: Path | str, model: Any, optimizer: Any, rule: str, **options: Any) -> None:
    """A chain is loaded as a whole checkpoint is; rows are those of the model."""
    whole = Path(tempfile.mkdtemp(dir=Path(run).parent))
    hb.save(whole, model, optimizer, step=0)
    of_chain, of_whole = loaded(run, rule, **options), loaded(whole, rule, **options)
    found = everything(*of_chain)
    assert same(found, everything(*of_whole))
    for name, value in everything(model).items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
    for one, its_optimizer in (of_chain, of_whole):  # rows that are behind are so by as much
        with torch.random.fork_rng():
            torch.manual_seed(0)
            train(one, its_optimizer, range(200, 203))
    assert same(everything(*of_chain), everything(*of_whole))


def grown(run: Path, steps: int, **options: Any) -> tuple[Any, Any, list[hb.checkpoint.Saved]]:
    """A run that was saved after each step."""
    model, optimizer = made("memory", run.parent, "Adam")
    saves = []
    for step in range(steps):
        train(model, optimizer, range(step, step + 1))
        saves.append(hb.save(run, model, optimizer, step=step, **options))
    return model, optimizer, saves
