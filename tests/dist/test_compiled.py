"""A distributed model that torch.compile has wrapped trains as without it."""

from __future__ import annotations

import pytest
import torch
from dist.test_arguments_of_ranks import Model
from dist.worlds import run

import hotbed as hb


def compiled(rank: int, world: int) -> None:
    plain, wrapped = hb.distribute(Model()), hb.distribute(Model())
    calls = plain, torch.compile(wrapped, backend="eager")
    optimizers = [hb.optim.SGD(model.parameters(), lr=0.1) for model in (plain, wrapped)]
    for number in range(4):
        for call, optimizer in zip(calls, optimizers, strict=True):
            call(torch.tensor([rank, number + 2])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*(model.tables.rows("a").values for model in (plain, wrapped)))
    assert torch.equal(plain.one.weight.detach(), wrapped.one.weight.detach())


@pytest.mark.process
def test_a_compiled_model_trains_on_ranks() -> None:
    run(2, compiled)
