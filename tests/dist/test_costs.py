"""Predicted bytes and seconds: by counting id by id, and by what two ranks send."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from dist.placements import table
from dist.test_plans import kinds
from dist.worlds import run
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb
from hotbed.dist import (
    ColumnWise,
    GridWise,
    Plan,
    Rates,
    Replicated,
    RowWise,
    Sharding,
    TableWise,
    Traffic,
)
from hotbed.dist.costs import SENT, Costs
from hotbed.dist.rates import PHASES, UNITS
from hotbed.dist.sizes import Sizes, States

FREE = Rates.of([0.0] * len(UNITS))


def costs(ranks: int, traffic: dict[str, Traffic], rates: Rates = FREE, **options: Any) -> Costs:
    return Costs(ranks, rates, traffic, Sizes(States(1, 0)), **options)


def counted(plan: Plan, name: str, of_ranks: list[Tensor], by_bags: bool) -> dict[str, list[float]]:
    """Bytes that each rank sends for one table: a piece for each requester and owner, id by id."""
    world = plan.world_size
    found = {what: [0.0] * world for what in SENT}
    for requester, bags in enumerate(of_ranks):
        ids = bags.flatten() if by_bags else bags.unique()
        for owner in range(world):
            part = plan.part(name, owner)
            if part.rows == 0 or owner == requester:
                continue
            is_split = isinstance(plan.shardings[name], RowWise)
            here = ids[plan.owner_of(name, ids) == owner] if is_split else ids
            lengths = 4 * len(bags) if by_bags and is_split else 0
            vectors = len(bags) if by_bags else len(here)
            found["ids"][requester] += 8 * len(here) + lengths
            found["gradients"][requester] += vectors * part.dim * 4
            if plan.shardings[name] != Replicated():
                found["vectors" if by_bags else "rows"][owner] += vectors * part.dim * 4
    return found


@given(st.data(), st.integers(2, 5), st.integers(1, 9), st.booleans())
def test_bytes_are_those_counted_id_by_id(data: Any, world: int, dim: int, by_bags: bool) -> None:
    kind = data.draw(kinds(dim, world, False))
    ids_a_bag = 2 * world if by_bags else 1
    one = table("T", 40, dim, combiner="sum")
    plan = Plan([one], world, {"T": kind})
    # Every rank asks for every id as often as the others do, so that no owner is asked more.
    bags = torch.arange(40 * ids_a_bag).remainder(40).view(-1, ids_a_bag)
    traffic = hb.dist.traffic_of([one], [{"T": bags}])
    sent = costs(world, traffic).of_table(one, plan.shardings["T"]).sent
    expected = counted(plan, "T", [bags] * world, by_bags)
    # Of a table whose rows do not divide, ids neither.
    for what, of_ranks in zip(SENT, sent.tolist(), strict=True):
        assert of_ranks == pytest.approx(expected[what], rel=1e-9, abs=1e-9), what


def test_codecs_and_dtypes_count() -> None:
    one = table("T", 100, 16, dtype=torch.bfloat16)
    traffic = {"T": Traffic(50, 50, 20)}

    def sent(wire: tuple[str, str] = ("stored", "stored"), of: hb.Table = one) -> list[float]:
        found = costs(2, traffic, wire=wire).of_table(of, TableWise(0)).sent
        return found.sum(1).tolist()[:4]

    assert sent() == [160, 20 * 32, 0, 20 * 64]
    assert sent(("int8", "bfloat16")) == [160, 20 * 20, 0, 20 * 32]
    assert sent(of=dataclasses.replace(one, wire=("float16", "int8"))) == [160, 640, 0, 400]


@pytest.mark.parametrize(
    ("unit", "kind", "expected"),
    [
        ("grouped_id", TableWise(1), 100),
        ("row", TableWise(1), 2 * 30),
        ("row", RowWise(), 2 * 15),
        ("row", Replicated(), 30),
        ("row", ColumnWise((0, 1)), 2 * 30),
        ("row_byte", ColumnWise((0, 1)), 2 * 30 * 8 * 4),
        ("gradient_row", Replicated(), 2 * 30),
        ("updated_row", TableWise(0), 2 * 30),
        ("updated_byte", TableWise(0), 2 * 30 * 16 * 4 * 2),
        ("received_byte", TableWise(0), 30 * 16 * 4),
        ("received_gradient_byte", TableWise(0), 30 * 16 * 4),
        ("cold_byte", TableWise(0), 0),
        ("forward_call", TableWise(0), 1),
    ],
)
def test_a_step_is_its_work_by_its_price(unit: str, kind: Sharding, expected: float) -> None:
    one = table("T", 1000, 16)
    rates = Rates.of([float(name == unit) for name in UNITS])
    made = costs(2, {"T": Traffic(100, 100, 30)}, rates)
    total = made.of_calls().plus(made.of_table(one, kind))
    assert total.step == expected


def test_a_step_waits_for_the_slowest_rank_in_each_phase() -> None:
    tables = [table("A", 1000, 16), table("B", 1000, 16)]
    rates = Rates.of([float(name in ("row", "updated_row")) for name in UNITS])
    traffic = {"A": Traffic(100, 100, 30, 0.0), "B": Traffic(100, 100, 40, 0.0)}
    found = costs(2, traffic, rates).of_plan(
        {t.name: t for t in tables}, {"A": TableWise(0), "B": TableWise(1)}
    )
    assert found.seconds.shape == (len(PHASES), 2, 2)
    assert found.of_ranks.tolist() == [2 * 30 + 30, 2 * 40 + 40] and found.step == 120


def test_rows_of_large_shards_come_from_memory() -> None:
    rates = Rates.of([float(name == "cold_byte") for name in UNITS])
    made = costs(2, {"T": Traffic(100, 100, 30)}, rates)
    large = table("T", 1_000_000, 16)
    assert made.of_table(large, TableWise(0)).step == 2 * 30 * 16 * 4
    assert made.of_table(large, RowWise()).step == 30 * 16 * 4
    assert made.of_table(table("T", 100_000, 16), TableWise(0)).step == 0


def test_rows_on_an_ssd_cost_their_reads() -> None:
    one = table("T", 1000, 16)
    rates = Rates.of([2.0 * (name == "ssd_row") for name in UNITS])
    made = costs(2, {"T": Traffic(100, 100, 30)}, rates)
    total = made.of_table(one, TableWise(0))
    assert total.step == 0 and made.with_ssd(total, np.array([0.5, 1.0])).step == 0.5 * 60 * 2


# -- what ranks send -------------------------------------------------------------------------------

SHARDINGS: dict[str, Sharding] = {
    "table": TableWise(1),
    "row": RowWise(),
    "column": ColumnWise((1, 0)),
    "replicated": Replicated(),
}
ON_MACHINES: dict[str, Sharding] = {
    **SHARDINGS,
    "column": ColumnWise((3, 1, 0)),
    "grid": GridWise.of_machines(4, 2),
}
ROWS, SAMPLES = 30_000, 2048


def batch(rank: int, number: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(100 * rank + number)

    def ids(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=draw) ** 3 * ROWS).long()

    lengths = torch.randint(0, 21, (SAMPLES,), generator=draw)
    return {
        "one": ids(SAMPLES),
        "few": ids(SAMPLES, 3),  # which owners pool, but of a table cut by row
        "bags": ids(SAMPLES, 12),
        "uneven": hb.Jagged(ids(int(lengths.sum())), lengths=lengths),
        "again": ids(SAMPLES),
    }


def sends(
    rank: int, world: int, kind: Sharding, wire: tuple[str, str], local: int | None = None
) -> None:
    names = ("one", "few", "bags", "uneven")
    tables = [hb.Table(name, 16, ROWS, combiner="sum", padding_idx=0) for name in names]
    tables[1] = dataclasses.replace(tables[1], dtype=torch.bfloat16)
    features = {name: name for name in names} | {"again": "one"}
    model = hb.EmbeddingCollection(tables, features, seed=1)
    plan = Plan(tables, world, dict.fromkeys(names, kind))
    hb.distribute(model, plan, rows=wire[0], gradients=wire[1], local_world_size=local)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    batches = [batch(rank, number) for number in range(4)]
    for each in batches:
        sum(vectors.sum() for vectors in model(each).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks: Any = model.table("one").place.ranks
    traffic = hb.dist.traffic_of(tables, batches, features)
    predicting = costs(world, traffic, wire=wire, local_world_size=local)
    found = predicting.of_plan(plan.tables, plan.shardings)
    room = 1 if local is None else 8 * len(tables)  # for counts that go along with ids
    for what, predicted in zip(SENT, found.sent[:, rank].tolist(), strict=True):
        sent = ranks.sent.get(what, 0) / len(batches)
        assert predicted == pytest.approx(sent, rel=0.05, abs=room), (what, predicted, sent)


@pytest.mark.process
@pytest.mark.parametrize("wire", [("stored", "stored"), ("int8", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("kind", SHARDINGS)
def test_predicted_bytes_are_sent(kind: str, wire: tuple[str, str]) -> None:
    run(2, sends, SHARDINGS[kind], wire)


@pytest.mark.process
@pytest.mark.parametrize("kind", ON_MACHINES)
def test_predicted_bytes_are_sent_by_machines(kind: str) -> None:
    run(4, sends, ON_MACHINES[kind], ("stored", "stored"), 2)


@pytest.mark.process
def test_predicted_bytes_of_codecs_are_sent_by_machines() -> None:
    run(4, sends, RowWise(), ("int8", "bfloat16"), 2)
