"""Long bags with weights are no bags for owners to pool, whichever ranks have weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from dist.worlds import run

import hotbed as hb
from hotbed.dist import Plan, TableWise
from hotbed.dist.ranks import Ranks

ROWS, SAMPLES, LENGTH = 40, 6, 5


def weighted(rank: int, world: int, with_weights: Sequence[int]) -> None:
    alone, shared = (
        hb.EmbeddingCollection([hb.Table("item", 4, ROWS, combiner="mean")], seed=2)
        for _ in range(2)
    )
    hb.distribute(shared, Plan([*shared.tables.values()], world, {"item": TableWise(1)}))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(ROWS, (world, SAMPLES * LENGTH), generator=draw)
    weights = torch.rand((world, SAMPLES * LENGTH), generator=draw).requires_grad_()
    own_weights = weights.detach().clone().requires_grad_()
    ones = torch.ones_like(weights)
    chosen = torch.tensor([[r in with_weights] for r in range(world)])
    lengths = [LENGTH] * SAMPLES
    together = alone(
        {
            "item": hb.Jagged(
                ids.flatten(),
                lengths=lengths * world,
                weights=torch.where(chosen, weights, ones).flatten(),
            )
        }
    )["item"]
    given = {"weights": own_weights[rank]} if rank in with_weights else {}
    own = shared({"item": hb.Jagged(ids[rank], lengths=lengths, **given)})["item"]
    torch.testing.assert_close(own, together[SAMPLES * rank : SAMPLES * (rank + 1)])
    together.square().sum().div(world).backward()
    own.square().sum().backward()
    if rank in with_weights:
        assert weights.grad is not None and own_weights.grad is not None
        torch.testing.assert_close(own_weights.grad[rank], weights.grad[rank] * world)
    for model in (alone, shared):
        hb.optim.SGD(model.parameters(), lr=0.5).step()
    every = torch.arange(ROWS)
    torch.testing.assert_close(shared.lookup("item", every), alone.lookup("item", every))
    assert "vectors" not in cast(Ranks, shared.table("item").place.ranks).sent


@pytest.mark.process
@pytest.mark.parametrize("with_weights", [(0, 1), (0,), (1,)])
def test_weights_of_some_ranks(with_weights: Sequence[int]) -> None:
    run(2, weighted, with_weights)
