"""Owners of rows in any order: the r-th of n has the r-th rows, wherever its rank comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_grids import TABLES, USERS, rows_of, steps, trained
from dist.test_new_sharding import Backwards
from dist.worlds import run
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.dist import ColumnWise, GridWise, Plan, PlanError, Replicated, RowWise, TableWise

STATIC, DYNAMIC = hb.Table("static", 4, 100), hb.Table("dynamic", 4)
IDS = torch.arange(100)


def test_the_first_owner_has_the_first_rows() -> None:
    plan = Plan([STATIC], 4, {"static": RowWise(owners=(3, 1))})
    assert plan.owner_of("static", [0, 1, 2]).tolist() == [3, 1, 3]
    assert plan.part("static", 3).origin.ids_in_table(0) == 0
    assert plan.part("static", 1).origin.ids_in_table(0) == 1
    assert plan != Plan([STATIC], 4, {"static": RowWise(owners=(1, 3))})
    grid = Plan([STATIC], 4, {"static": GridWise(((3, 2), (0, 1)))})
    assert grid.owner_of("static", [0, 1]).tolist() == [3, 0]
    assert grid.owner_of("static", [0, 1], column=3).tolist() == [2, 1]


@given(st.integers(1, 4), st.integers(4, 7), st.randoms())
def test_other_ranks_take_the_places_of_a_plan(world: int, size: int, random: Any) -> None:
    ranks = random.sample(range(size), world)
    half = max(1, world // 2)
    groups = tuple(tuple(range(begin, min(world, begin + half))) for begin in range(0, world, half))
    kinds = [RowWise(), RowWise("modulo"), RowWise(owners=(world - 1,)), GridWise(groups)]
    kinds += [TableWise(world - 1), ColumnWise(tuple(range(world)))]
    for table in (STATIC, DYNAMIC):
        for kind in kinds:
            plan = Plan([table], world, {table.name: kind})
            moved = plan.on(ranks, size)
            for column in range(4):
                before = plan.owner_of(table.name, IDS, column=column)
                after = moved.owner_of(table.name, IDS, column=column)
                assert torch.equal(after, torch.tensor(ranks)[before])
            for rank in range(world):
                assert moved.part(table.name, ranks[rank]) == plan.part(table.name, rank)


def test_a_plan_keeps_the_order_in_a_file(tmp_path: Path) -> None:
    kinds = {"static": RowWise(owners=(3, 1)), "dynamic": GridWise(((2,), (0, 1)))}
    plan = Plan([STATIC, DYNAMIC], 4, kinds)
    plan.write(tmp_path / "plan.toml")
    read = Plan.read(tmp_path / "plan.toml", [STATIC, DYNAMIC])
    assert read == plan and read.shardings == plan.shardings
    assert Plan.from_json(plan.as_json(), [STATIC, DYNAMIC]) == plan


def test_ranks_that_cannot_take_a_place() -> None:
    for kind in (Replicated(), RowWise()):
        plan = Plan([STATIC], 2, {"static": kind})
        for ranks in ((-1, 0), (0, 4)):
            with pytest.raises(PlanError, match=r"is outside \[0, 4\)"):
                plan.on(ranks, 4)
    with pytest.raises(PlanError, match="'static': sharding 'backwards' has no method on"):
        Plan([STATIC], 2, {"static": Backwards()}).on((3, 1), 4)
    with pytest.raises(PlanError, match="rank 3 is outside"):
        Plan([STATIC], 3, {"static": RowWise(owners=(3, 1))})


def of_all(kind: Any, world: int) -> Plan:
    return Plan(TABLES, world, {table.name: kind for table in TABLES})


def trains(rank: int, world: int, folder: str, kind: Any, local: int | None) -> None:
    model, optimizer = trained(rank, world, kind, local)
    plan, at_home = of_all(kind, world), torch.arange(60)
    for name, ids in (("static", at_home), ("half", at_home), ("dynamic", USERS)):
        dim = model.tables[name].dim
        owners = torch.stack([plan.owner_of(name, ids, column=column) for column in range(dim)])
        model.assign(name, ids[rank::world], torch.ones(len(ids[rank::world]), dim))
        assert torch.equal(model.contains(name, ids, local=True), (owners == rank).any(0))
    steps(model, optimizer, rank, world, range(3))
    hb.save(folder, model, optimizer, step=3)
    steps(model, optimizer, rank, world, range(3, 5))
    assert model.contains("dynamic", USERS).all()
    rows = rows_of(model)
    if rank == 0:
        torch.save(rows, f"{folder}.pt")
    hb.load(folder, model, optimizer)
    steps(model, optimizer, rank, world, range(3, 5))
    assert all(map(torch.equal, rows_of(model), rows))


def goes_on(rank: int, world: int, folder: str, kind: Any) -> None:
    model, optimizer = trained(rank, world, kind, None)
    hb.load(folder, model, optimizer)
    steps(model, optimizer, rank, world, range(3, 5))
    assert all(map(torch.equal, rows_of(model), torch.load(f"{folder}.pt")))


def alone(rank: int, world: int, folder: str) -> None:
    """Rows after the same steps in one process."""
    model, optimizer = trained(rank, world, None, None)
    for name, ids in (("static", range(60)), ("half", range(60)), ("dynamic", USERS)):
        model.assign(name, ids, torch.ones(len(ids), model.tables[name].dim))
    steps(model, optimizer, rank, world, range(5))
    assert all(map(torch.equal, rows_of(model), torch.load(f"{folder}.pt")))


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "local"),
    [
        (RowWise(owners=(3, 0, 1)), None),
        (RowWise("modulo", (2, 3, 1, 0)), 2),
        (RowWise(owners=(3, 1)), 2),
        (GridWise(((3, 2), (0, 1))), 2),
        (GridWise(((3,), (2, 0), (1,))), None),
    ],
)
def test_ranks_train_as_one_process(kind: Any, local: int | None, tmp_path: Path) -> None:
    if isinstance(kind, RowWise) and kind.placement == "modulo":
        assert of_all(kind, 4).owner_of("dynamic", [0, 1, -1]).tolist() == [2, 3, 0]
    folder = str(tmp_path / "run")
    run(4, trains, folder, kind, local)
    run(1, alone, folder)
    run(1, goes_on, folder, None)
    run(2, goes_on, folder, RowWise(owners=(1, 0)))
    run(3, goes_on, folder, GridWise(((2,), (0, 1))))


VALUES = [hb.Table("sum", 3, 90, "sum"), hb.Table("none", 4)]


def follows_values(rank: int, world: int, kind: Any) -> None:
    """Gradients that rows decide: of whole-number rows, whose sums round nowhere."""
    whole, model = (hb.EmbeddingCollection(VALUES, seed=2) for _ in range(2))
    hb.distribute(model, Plan(VALUES, world, {table.name: kind for table in VALUES}))
    drawn = torch.Generator().manual_seed(0)
    rows = {t.name: torch.randint(-4, 5, (90, t.dim), generator=drawn).float() for t in VALUES}
    for name, values in rows.items():
        model.assign(name, torch.arange(90)[rank::world], values[rank::world])
        whole.assign(name, torch.arange(90), values)
    batches = [
        {
            "sum": torch.randint(90, (4 * world, 12), generator=drawn),
            "none": torch.randint(90, (4 * world,), generator=drawn),
        }
        for _ in range(4)
    ]
    own = [{name: ids[4 * rank :][:4] for name, ids in batch.items()} for batch in batches]
    both = [(one, hb.optim.SGD(one.parameters(), lr=0.5)) for one in (model, whole)]
    for mine, every in zip(own, batches, strict=True):
        for (one, optimizer), batch, scale in zip(both, (mine, every), (world, 1), strict=True):
            found = one(batch)
            loss = sum((vectors.remainder(2) * vectors).sum() for vectors in found.values())
            (scale * loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name in rows:
            assert torch.equal(
                model.lookup(name, torch.arange(90)), whole.lookup(name, torch.arange(90))
            )


@pytest.mark.process
@pytest.mark.parametrize("kind", [RowWise(owners=(2, 0, 1)), GridWise(((2,), (1, 0)))])
def test_gradients_reach_their_rows(kind: Any) -> None:
    run(3, follows_values, kind)
