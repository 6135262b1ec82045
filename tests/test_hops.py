"""Files of Python that a forward passes, and functions that it calls, after warm-up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from dist.worlds import run

import hotbed as hb

LIBRARY = str(Path(hb.__file__).parent) + "/"
MOST_FILES = {"memory": 6, "tiers": 9, "ranks": 15, "bags on ranks": 16}
MOST_CALLS = {"memory": 70, "tiers": 90, "ranks": 180, "bags on ranks": 215}


class Passed:
    """Functions of Hotbed that this thread enters, comprehensions among them."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def _entered(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            self.files.append(frame.f_code.co_filename.removeprefix(LIBRARY))

    def __enter__(self) -> Passed:
        self._before = sys.getprofile()
        sys.setprofile(self._entered)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)


def made(storage: hb.Storage | None = None, dynamic: bool = True) -> hb.EmbeddingCollection:
    tables = [*(hb.Table(name, 8, 100) for name in "abc"), hb.Table("d", 8, None if dynamic else 9)]
    return hb.EmbeddingCollection(tables, seed=1, storage=storage)


def check(where: str, model: hb.EmbeddingCollection, ids: int = 2) -> None:
    batch = {name: torch.tensor([[3, 1], [4, 5], [7, 3]])[:, :ids] for name in "abcd"}
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with Passed() as passed:
            outputs = [*model(batch).values()]
        torch.autograd.backward(outputs, outputs)
        optimizer.step()
        optimizer.zero_grad()
    files = sorted(set(passed.files))
    assert len(files) <= MOST_FILES[where], files
    assert len(passed.files) <= MOST_CALLS[where], (where, len(passed.files))


def test_in_memory() -> None:
    check("memory", made())


def test_in_tiers(tmp_path: Path) -> None:
    check("tiers", made(hb.Storage(host="1MB", ssd=tmp_path / "rows")))


def on_ranks(rank: int, world: int) -> None:
    for where, ids in (("ranks", 1), ("bags on ranks", 2)):
        model = made(dynamic=ids == 1)  # which is cut by row, so that two ids are no long bag
        hb.distribute(model)
        check(where, model, ids)


@pytest.mark.process
def test_on_ranks() -> None:
    run(2, on_ranks)
