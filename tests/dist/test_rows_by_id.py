"""Rows that are assigned and looked up by id on ranks."""

from __future__ import annotations

import os

import pytest
import torch
from dist.worlds import run
from torch import nn
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import ColumnWise, Plan, TableWise

KINDS = ["row", "replicated", TableWise(1), ColumnWise((1, 0))]


def strided(rank: int, world: int) -> None:
    """The memory of what is given may be used again at once."""
    for rows in (None, 400):
        tables = [hb.Table("a", 16, rows)]
        model = hb.EmbeddingCollection(tables, seed=1)
        hb.distribute(model, Plan(tables, world, {"a": "row"}))
        ids = torch.arange(400)
        given = torch.arange(400 * 16, dtype=torch.float32).view(16, 400)
        model.assign("a", ids, given.t())
        assert torch.equal(model.lookup("a", ids), given.t())
        every_other = given.t().repeat(2, 1)[rank::2] + 1
        model.assign("a", ids, every_other if rank == world - 1 else given.t())
        assert torch.equal(model.lookup("a", ids), every_other) or rank < world - 1


@pytest.mark.process
def test_values_that_are_not_contiguous() -> None:
    run(2, strided)


def padding(rank: int, world: int, rows: int | None) -> None:
    tables = [hb.Table("a", 2, rows, padding_idx=0)]
    for kind in KINDS:
        model = hb.EmbeddingCollection(tables, seed=1)
        hb.distribute(model, Plan(tables, world, {"a": kind}))
        model.assign("a", torch.arange(3), torch.ones(3, 2))
        optimizer = hb.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, untouched="exact")
        for _ in range(5):
            model({"a": torch.tensor([[0, 1], [1, 1]])})["a"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = torch.full((2,), (1 - 0.1 * 0.1) ** 5)
        found = model.lookup("a", torch.tensor([0, 2]))
        assert torch.allclose(found, expected.expand(2, 2)), (kind, found)
        ids, whole = model.rows("a")
        assert torch.equal(found, whole[(ids == 0) | (ids == 2)]), kind


@pytest.mark.process
@pytest.mark.parametrize("rows", [None, 10])
def test_the_padding_row_is_caught_up(rows: int | None) -> None:
    run(2, padding, rows)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = hb.EmbeddingCollection([hb.Table("a", 4, 21)], seed=1)
        self.dense = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(self.tables({"a": ids})["a"])
        return found


def uneven(rank: int, world: int, rule: str) -> None:
    model = hb.distribute(Model())
    options = {"momentum": 0.9} if rule == "SGD" else {}
    optimizer = getattr(hb.optim, rule)(model.parameters(), lr=0.1, **options)
    for epoch in range(3):
        last = (epoch + 1) % world  # each rank ends last in turn
        with Join(hb.dist.joinables(model)):
            for step in range(2 + 3 * (rank == last)):
                model(torch.tensor([rank, step])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        own = [p.detach() for p in model.dense.parameters()]
        states = [optimizer.state[p] for p in model.dense.parameters()]
        flat = [
            *own,
            *(torch.as_tensor(v, dtype=torch.float32) for s in states for v in s.values()),
        ]
        mine = torch.cat([one.flatten() for one in flat])
        every = [torch.empty_like(mine) for _ in range(world)]
        torch.distributed.all_gather(every, mine)
        assert all(torch.equal(one, every[0]) for one in every), (rule, epoch, every)


@pytest.mark.process
@pytest.mark.parametrize("rule", ["Adam", "Adagrad", "SGD"])
def test_dense_states_are_alike_after_join(rule: str) -> None:
    run(2, uneven, rule)


def forked(rank: int, world: int) -> None:
    model = hb.distribute(Model())
    loader = hb.dist.even([1, 2])
    child = os.fork()
    if not child:
        del model, loader
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    model(torch.tensor([1])).sum().backward()
    assert [*loader] == [1, 2]


@pytest.mark.process
def test_a_forked_child_lets_go_of_a_model() -> None:
    run(2, forked)
