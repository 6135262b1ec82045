"""A kind of sharding, and a strategy, that nobody knows of: a class and an entry add each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from dist.worlds import run
from torch import Tensor

import hotbed as hb
from hotbed import _core
from hotbed.dist import Plan, Sharding
from hotbed.dist.strategies import STRATEGIES
from hotbed.sharding import KINDS, Extent, Kept, Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Backwards(Sharding):
    """Id i of a static table lies on the last rank but i % n."""

    name: ClassVar[str] = "backwards"

    def fault(self, table: Shape, world_size: int) -> str:
        return "it is dynamic" if table.rows is None else ""

    def extents(self, table: Shape, rows: int, world_size: int) -> list[Extent]:
        return [Extent(range(world_size), -(-rows // world_size), table.dim)]

    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        return Kept(0, table.dim, world_size - 1 - rank, world_size)

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        return world_size - 1 - ids % world_size

    def owner_rule(self, table: Shape) -> _core.OwnerRule | None:
        return _core.OwnerRule.given

    def described(self, table: Shape) -> tuple[str, str]:
        return "backwards", "all"


def model_and_optimizer() -> tuple[hb.EmbeddingCollection, hb.optim.Adagrad]:
    model = hb.EmbeddingCollection([hb.Table("a", 4, 21), hb.Table("b", 2, 9)], seed=1)
    return model, hb.optim.Adagrad(model.parameters(), lr=0.1)


def trains(rank: int, world: int, folder: str) -> None:
    KINDS[Backwards.name] = Backwards
    STRATEGIES["backwards"] = lambda tables, *_: {t.name: Backwards() for t in tables}
    model = hb.EmbeddingCollection([hb.Table("a", 4, 21), hb.Table("b", 2, 9)], seed=1)
    plan = hb.plan(model, world, strategy="backwards")
    plan.write(f"{folder}/plan-{rank}.toml")
    assert Plan.read(f"{folder}/plan-{rank}.toml", model.tables.values()) == plan
    assert "backwards" in str(plan)
    hb.distribute(model, plan)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    whole, of_whole = model_and_optimizer()
    ids = torch.tensor([[0, 1, 2, 8], [8, 3, 3, 4], [5, 5, 7, 0]])
    for ranks_ids in (ids, ids.flip(0)):
        own = ranks_ids[rank::world]
        sum(v.sum() for v in model({"a": own, "b": own}).values()).backward()
        out = whole({"a": ranks_ids, "b": ranks_ids})
        (sum(v.sum() for v in out.values()) / world).backward()
        for each in (optimizer, of_whole):
            each.step()
            each.zero_grad()
    for name in model.tables:
        torch.testing.assert_close(model.rows(name).values, whole.rows(name).values)
    model.assign("a", [rank, 20], torch.full((2, 4), 3.0))
    assert model.lookup("a", [0, 1, 20]).eq(3).all()
    assert model.contains("a", [0, 20]).all()


@pytest.mark.process
def test_a_kind_and_a_strategy_of_a_test(tmp_path: Path) -> None:
    run(2, trains, str(tmp_path))


@dataclasses.dataclass(frozen=True, slots=True)
class Odd(Backwards):
    """Names owners that have nothing, or no whole numbers, once it is in use."""

    name: ClassVar[str] = "odd"
    in_use: ClassVar[bool] = False
    how: str = "none"

    def kept(self, table: Shape, rank: int, world_size: int) -> Kept | None:
        return Kept(0, table.dim) if rank == 0 else None

    def owner_of(
        self, table: Shape, ids: Tensor, world_size: int, column: int = 0, requester: int = 0
    ) -> Tensor:
        if not Odd.in_use:
            return torch.zeros_like(ids)
        owners = torch.full_like(ids, int(self.how == "none"))
        return {"float": owners.double(), "one": owners[:1]}.get(self.how, owners)


def refuses(rank: int, world: int, how: str, says: str) -> None:
    model = hb.EmbeddingCollection([hb.Table("a", 4, 21)])
    Odd.in_use = False
    hb.distribute(model, Plan(model.tables.values(), world, {"a": Odd(how)}))
    Odd.in_use = True
    for _ in range(2):  # and goes on together
        with pytest.raises(hb.PlanError, match=says):
            model({"a": torch.arange(3)})


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("none", "rank 1 owns ids and has no shard"),
        ("float", r"must return \(3,\) int64 ranks; got \(3,\) torch.float64"),
        ("one", r"must return \(3,\) int64 ranks; got \(1,\)"),
    ],
)
def test_owners_that_cannot_be(how: str, says: str) -> None:
    run(2, refuses, how, says)
