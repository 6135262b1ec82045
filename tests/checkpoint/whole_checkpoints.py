"""What must be true of checkpoints whatever has happened to the process or the disk."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoint.small_models import everything, made, same, train

import hotbed as hb
from hotbed.checkpoint.folder import complete_in
from hotbed.checkpoint.inspect import verified

STEPS = 4
"""Of the training of `made("memory", ..., "Adam")` that is saved."""


@cache
def ends_as() -> dict[str, Any]:
    """What a training that nothing has stopped ends as."""
    with torch.random.fork_rng():
        model, optimizer = made("memory", Path(), "Adam")
        train(model, optimizer, range(STEPS))
        return everything(model, optimizer)


def check_whole(run: Path) -> None:
    """Every checkpoint that is there is as it was saved."""
    for path in complete_in(str(run)):
        assert [fault for _, _, fault in verified(path) if fault] == []


def check_goes_on(run: Path) -> int:
    """Training goes on from the latest checkpoint, with the same bits. Returns its step."""
    check_whole(run)
    with torch.random.fork_rng():
        model, optimizer = made("memory", run.parent, "Adam")
        step = hb.load(run, model, optimizer).step
        train(model, optimizer, range(step, STEPS))
        assert same(everything(model, optimizer), ends_as())
    return step


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())
