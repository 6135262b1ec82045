"""What a step on ranks costs with many tables: as many instructions of Python for each."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from dist.worlds import run

import hotbed as hb
from hotbed.dist import Plan, Replicated, RowWise, TableWise

KINDS = (Replicated(), RowWise(), TableWise(0), TableWise(1))
MOST_CALLS = 65
"""Of Python's functions, for a table and step."""


class Counted:
    """Instructions of Python and calls of its functions, of this thread. What C loops over is not seen."""

    def __init__(self) -> None:
        self.instructions = self.calls = 0

    def _inside(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.instructions += event == "opcode"
        return self._inside

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def __enter__(self) -> Counted:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(self._before)


def count(tables: int, world: int) -> Counted:
    made = [hb.Table(f"t{n}", 4, 20) for n in range(tables)]
    model = hb.EmbeddingCollection(made, seed=1)
    kinds = {table.name: KINDS[n % len(KINDS)] for n, table in enumerate(made)}
    hb.distribute(model, Plan(made, world, kinds))
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    batch = {table.name: torch.tensor([3, 1, 3]) for table in made}
    for _ in range(3):
        with Counted() as counted:
            outputs = [*model(batch).values()]
            torch.autograd.backward(outputs, outputs)
            optimizer.step()
            optimizer.zero_grad()
    return counted


def linear(rank: int, world: int) -> None:
    few, more, most = (count(tables, world) for tables in (40, 80, 160))
    grown = most.instructions - more.instructions
    assert grown <= 2.06 * (more.instructions - few.instructions), grown
    assert (most.calls - more.calls) / 80 <= MOST_CALLS, (most.calls - more.calls) / 80


@pytest.mark.process
def test_python_of_a_step_grows_as_the_tables_do() -> None:
    run(2, linear)
