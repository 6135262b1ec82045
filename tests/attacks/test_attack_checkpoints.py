"""Checkpoints that were damaged or written by an enemy, by everything that reads them: an error of
Hotbed's, or what a checkpoint holds."""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.damage import CHECKED, UNTOLD, contents_of
from attacks.harness import PATIENCE, attack, seeds
from checkpoint.saved_models import MANIFEST
from checkpoint.small_models import made, train

import hotbed as hb
from hotbed.checkpoint import load_model, read
from hotbed.checkpoint.inspect import contents, differences, verified
from hotbed.data.position import Position
from hotbed.errors import HotbedError
from hotbed.models import DLRM

MOST_MEMORY = 256 << 20
"""Bytes of addresses that reading may ask for: a thousand times what the files have."""

Made = Callable[[Path], tuple[Any, Any]]


def with_layers(folder: Path) -> tuple[Any, Any]:
    return made("memory", folder, "Adam", untouched="exact")


def from_the_zoo(folder: Path) -> tuple[Any, Any]:
    tables = [hb.Table("item", 4, rows=60), hb.Table("user", 4, padding_idx=-1)]
    model = DLRM(tables, dim=4, num_dense=1, top=[3], seed=0)
    return model, hb.optim.Adagrad(model.parameters(), lr=0.1)


def trained(model: Any, optimizer: Any, steps: range) -> None:
    if not isinstance(model, DLRM):
        train(model, optimizer, steps)
        return
    for step in steps:
        ids = torch.arange(8) * (step + 1) % 60
        model({"item": ids, "user": ids, "dense": torch.ones(8, 1)}).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def limited() -> Iterator[None]:
    """No more memory than some megabytes can be had, and no more than some time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, before)


def readers(folder: Path, whole: Path, make: Made, chance: random.Random) -> list[Any]:
    """Everything that reads a checkpoint; of the ways to load it, one."""
    model, optimizer = make(folder.parent)
    if chance.random() < 0.3:
        trained(model, optimizer, range(2))
    given: dict[str, Any] = {"strict": chance.random() < 0.5}
    if chance.random() < 0.7:
        given["optimizer"] = optimizer
    if chance.random() < 0.3:
        given["loader"] = Position()
    if "optimizer" not in given and chance.random() < 0.7:
        model = type(model)("memory", folder) if make is with_layers else model

    def load_and_go_on() -> None:
        hb.load(folder, model, **given)
        if "optimizer" in given:
            trained(model, optimizer, range(3, 5))

    tables = [*json.loads((whole / MANIFEST).read_text())["tables"], "x"]
    return [
        load_and_go_on,
        lambda: load_model(folder),
        lambda: [*verified(str(folder))],
        lambda: contents(str(folder)),
        lambda: [*differences(str(folder), str(whole))],
        lambda: [*differences(str(whole), str(folder))],
        *[lambda table=table: [*read(folder, table)] for table in tables],
    ]


def check_told(error: BaseException) -> None:
    """It says little, and memory is not what was missing."""
    assert len(str(error)) < 20_000
    cause: BaseException | None = error
    while cause is not None:
        assert not isinstance(cause, MemoryError), error
        assert "allocate memory" not in str(cause)
        cause = cause.__cause__ or cause.__context__


def test_hostile_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretend_memory: Callable[[int], None]
) -> None:
    """Ten minutes of `make soak` by itself."""
    monkeypatch.setattr("hotbed.checkpoint.rows.FILE_BYTES", 1)
    whole = tmp_path / "whole"
    subjects: list[tuple[Made, Path, Path]] = []
    for make in (with_layers, from_the_zoo):
        model, optimizer = make(tmp_path)
        folders = []
        for step in (3, 4):
            trained(model, optimizer, range(step))
            saved = hb.save(whole / make.__name__ / str(step), model, optimizer, step=step)
            folders.append(Path(saved.path))
        subjects.append((make, folders[0], folders[1]))
    pretend_memory(MOST_MEMORY)
    for seed in seeds(1.0, usual=60):
        with attack(seed) as chance:
            make, first, second = chance.choice(subjects)
            there = tmp_path / "there"
            shutil.copytree(whole, there)
            change = chance.choice((*CHECKED, *UNTOLD, *UNTOLD))
            change(there / first.relative_to(whole), there / second.relative_to(whole), chance)
            before = contents_of(there)
            for reader in readers(there / first.relative_to(whole), first, make, chance):
                try:
                    with limited():
                        reader()
                except HotbedError as error:
                    check_told(error)
            assert contents_of(there) == before
            shutil.rmtree(there)
