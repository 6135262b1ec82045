"""Plans that know machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.trainings import values_of
from dist.worlds import run
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.app import app
from hotbed.dist import ColumnWise, GridWise, Plan, PlanError, RowWise

MACHINES = GridWise(((0, 1), (2, 3)))


def tables(**options: Any) -> list[hb.Table]:
    return [
        hb.Table("pooled", 8, 10**7, "mean", **options),
        hb.Table("ids", 8, None, "none"),
        hb.Table("narrow", 1, 10**7, "sum"),
    ]


def kinds(optimizer: Any, ranks: Any = 4) -> dict[str, Any]:
    return hb.plan(tables(), ranks, optimizer=optimizer).shardings


def test_machines_keep_rows_of_pooled_tables_and_their_ranks_columns() -> None:
    found = kinds("adagrad", (2, 2))
    assert found["pooled"] == GridWise(MACHINES.groups, "modulo")
    assert found["ids"] == RowWise("hash")  # whose rows come one by one
    assert found["narrow"] == RowWise("modulo")  # has no column for each rank of a machine
    flat = kinds("adagrad")
    assert all(kinds("adagrad", ranks) == flat for ranks in ((1, 4), (4, 1)))


def test_rules_that_need_whole_rows_have_no_grids() -> None:
    for optimizer in ("rowwise-adagrad", None):
        assert kinds(optimizer, (2, 2)) == kinds(optimizer)


@pytest.mark.parametrize("strategy", ["auto", "basic", "memory_balanced", "memory_optimized"])
def test_a_wish_for_a_grid_is_fulfilled(strategy: str) -> None:
    for wish in ("grid", GridWise()):
        made = hb.plan(tables(sharding=wish), (2, 2), strategy=strategy)
        assert made.shardings["pooled"] == GridWise(MACHINES.groups, "modulo")
        alone = hb.plan(tables(sharding=wish), 1, strategy=strategy)
        assert alone.part("pooled", 0) == alone.tables["pooled"]
        with pytest.raises(PlanError, match="'pooled': sharding 'grid' needs the ranks of m"):
            hb.plan(tables(sharding=wish), 4, strategy=strategy)


@pytest.mark.parametrize(
    "given", [(2, 0), (0, 2), (2, -1), (2, None), (2, True), (2, 2.0), (2,), "22"]
)
def test_machines_that_cannot_be(given: Any) -> None:
    with pytest.raises(PlanError, match="world_size"):
        hb.plan(tables(), given)


def test_a_printed_plan_tells_which_bags_owners_pool() -> None:
    printed = str(hb.plan(tables(), (2, 2), optimizer="adagrad"))
    assert "(of tables cut by row 8, as a grid of 2 groups 4) ids or more" in " ".join(
        printed.split()
    )


def test_every_element_has_one_owner(tmp_path: Path) -> None:
    table = hb.Table("t", 5, 11, "sum")
    for groups in (((0, 1), (2, 3)), ((3,), (0, 2)), ((1, 0, 2),), ((0,), (1,), (2,), (3,))):
        plan = Plan([table], 4, {"t": GridWise(groups)})
        seen = torch.zeros(11, 5)
        for rank in range(4):
            part = plan.part("t", rank)
            ids = part.origin.ids_in_table(torch.arange(part.rows or 0))
            columns = range(part.origin.column, part.origin.column + part.dim)
            for column in columns if len(ids) else ():
                seen[ids, column] += 1
                assert (plan.owner_of("t", ids, column=column) == rank).all()
        assert (seen == 1).all()
        plan.write(tmp_path / "plan.toml")
        assert Plan.read(tmp_path / "plan.toml", [table]) == plan


def test_remedies_keep_machines_whole() -> None:
    with pytest.raises(PlanError) as raised:
        hb.plan(tables(), (2, 2), optimizer="adam", memory="100MB")
    for remedy in raised.value.remedies:
        made = hb.plan(**remedy.arguments)
        assert made.world_size % 2 == 0


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        (((0, 1), (1, 2)), "must be distinct ranks over all groups"),
        (((0, 4),), "rank 4"),
        (((0, 1), ()), "GridWise"),
        ((0, 1), "GridWise"),
    ],
)
def test_groups_that_cannot_be(groups: Any, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        Plan([hb.Table("t", 5, 11)], 4, {"t": GridWise(groups)})
    with pytest.raises(PlanError, match="2 ranks are to keep columns, and it has 1"):
        Plan([hb.Table("t", 1, 11)], 4, {"t": MACHINES})
    assert ColumnWise.name != GridWise.name


def test_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "tables.toml"
    file.write_text('[tables.item]\nrows = 10_000_000\ndim = 64\nsharding = "grid"\n')
    arguments = ["plan", "--tables", str(file), "--world-size", "4"]
    hb.dist.Rates().write(tmp_path / "rates.toml")
    for more in ([], ["--rates", str(tmp_path / "rates.toml")]):
        shown = CliRunner().invoke(
            app, [*arguments, "--local-world-size", "2", *more], env={"COLUMNS": "120"}
        )
        assert shown.exit_code == 0 and "(0, 1) (2, 3)" in shown.output
        assert ("is predicted to take" in shown.output) is bool(more)
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2 and "needs the ranks of machines" in refused.output
    odd = CliRunner().invoke(app, [*arguments, "--local-world-size", "3"])
    assert odd.exit_code == 2 and "must divide the 4 ranks" in odd.output


TABLES = [
    hb.Table("static", 5, 101, "sum"),
    hb.Table("dynamic", 4, None, "mean"),
    hb.Table("half", 8, 60, "none", torch.float16),
]
USERS = torch.arange(-20, 20) * 2**40


def trained(
    rank: int, world: int, kind: Any, local: int | None
) -> tuple[hb.EmbeddingCollection, Any]:
    """A model, shared where there are others, and its optimizer."""
    model = hb.EmbeddingCollection(TABLES, seed=3)
    if world > 1:
        plan = Plan(TABLES, world, {table.name: kind for table in TABLES})
        hb.distribute(model, plan, local_world_size=local)
    return model, hb.optim.Adam(model.parameters(), lr=0.1)


def steps(model: Any, optimizer: Any, rank: int, world: int, numbers: range) -> None:
    for number in numbers:
        drawn = torch.Generator().manual_seed(number)
        batch = {
            "static": torch.randint(0, 101, (12, 4), generator=drawn),
            "dynamic": USERS[torch.randint(0, 40, (12, 2), generator=drawn)],
            "half": torch.randint(0, 60, (12,), generator=drawn),
        }
        own = slice(12 * rank // world, 12 * (rank + 1) // world)
        found = model({name: ids[own] for name, ids in batch.items()}).values()
        (world * sum((values_of(one).float() * 0.5).sum() for one in found)).backward()
        optimizer.step()
        optimizer.zero_grad()


def rows_of(model: hb.EmbeddingCollection) -> list[torch.Tensor]:
    static = [model.rows(table.name).values for table in TABLES if table.rows]
    return [*static, model.lookup("dynamic", USERS)]


def saved(rank: int, world: int, folder: str, groups: Any, local: int | None) -> None:
    model, optimizer = trained(rank, world, GridWise(groups), local)
    steps(model, optimizer, rank, world, range(4))
    hb.save(folder, model, optimizer, step=4)
    steps(model, optimizer, rank, world, range(4, 6))
    rows = rows_of(model)
    if rank == 0:
        torch.save(rows, f"{folder}.pt")


def resumed(rank: int, world: int, folder: str, kind: Any) -> None:
    model, optimizer = trained(rank, world, kind, None)
    hb.load(folder, model, optimizer)
    steps(model, optimizer, rank, world, range(4, 6))
    assert all(map(torch.equal, rows_of(model), torch.load(f"{folder}.pt")))


@pytest.mark.process
@pytest.mark.parametrize(("groups", "local"), [(MACHINES.groups, 2), (((3,), (0, 2)), None)])
def test_a_run_goes_on_with_other_ranks(groups: Any, local: int | None, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run(4, saved, folder, groups, local)
    run(1, resumed, folder, None)
    run(2, resumed, folder, RowWise())
    run(3, resumed, folder, GridWise(((1,), (0, 2))))
