"""Dense layers and their states where ranks end at different times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from dist.test_distribute import loss_of as loss_of_model
from dist.test_distribute import made
from dist.test_sharded import batch_of
from dist.test_uneven import BATCHES, samples_of
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb


def other_optimizers(rank: int, world: int, has_tables: bool) -> None:
    """Dense layers whose optimizer holds no table, of a model with tables or without, stay alike."""
    torch.manual_seed(0)
    model: Any = made() if has_tables else torch.nn.Linear(3, 1)
    hb.distribute(model, timeout=10)
    tables, dense = hb.split_parameters(model)
    optimizers = [hb.optim.Adam(some, lr=0.01) for some in (tables, dense) if some]

    def step(number: int) -> None:
        batch = batch_of(number, samples_of(rank))
        plain = torch.ones(4, 3) * number
        (loss_of_model(model, batch) if has_tables else model(plain).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    with Join(hb.dist.joinables(model)):
        for number in range(BATCHES[rank]):
            step(number)
    for number in range(3):
        step(number)
        for parameter in dense:
            every = [torch.empty_like(parameter) for _ in range(world)]
            torch_dist.all_gather(every, parameter.detach())
            assert torch.equal(every[0], every[1])


@pytest.mark.process
@pytest.mark.parametrize("has_tables", [True, False])
def test_dense_layers_of_an_optimizer_without_tables_end_alike(has_tables: bool) -> None:
    run(2, other_optimizers, has_tables)
