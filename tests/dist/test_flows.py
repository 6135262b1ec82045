"""Bytes by way of ranks of the own machine: as counted id by id."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from dist.placements import table
from dist.test_costs import costs
from dist.test_plans import kinds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb
from hotbed.dist import GridWise, Measured, Plan, PlanError, Rates, Replicated, RowWise, TableWise
from hotbed.dist.costs import SENT
from hotbed.dist.flows import Topology
from hotbed.dist.rates import UNITS

FORWARD = {name: float(name == "received_byte") for name in UNITS}


def counted(plan: Plan, local: int, ids: Tensor) -> dict[str, list[float]]:
    """Bytes that each rank sends for table T, where each asks for all these ids: piece by piece."""
    world = plan.world_size
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * world)
    for owner in range(world):
        part = plan.part("T", owner)
        column = part.columns.start if part.rows else 0
        for rank in range(world):
            here = ids[plan.owner_of("T", ids, column=column) == owner] if part.rows else ids[:0]
            asks_owner = rank - rank % local + owner % local
            pieces = [(rank, asks_owner, " inside")]
            if rank == asks_owner:  # once for its machine
                pieces.append((rank, owner, ""))
            for sender, receiver, suffix in pieces:
                if sender != receiver:
                    room = 1 if suffix else local  # across, for those of each rank
                    found[f"ids{suffix}"][sender] += 8 * len(here) * room
                    found[f"rows{suffix}"][receiver] += len(here) * part.dim * 4
                    found[f"gradients{suffix}"][sender] += len(here) * part.dim * 4
    return found


@given(st.data(), st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.integers(1, 9))
def test_bytes_are_those_counted_id_by_id(data: Any, shape: tuple[int, int], dim: int) -> None:
    (machines, local), rows = shape, 60
    world = machines * local
    kind = data.draw(kinds(dim, world, False))
    if kind == Replicated():  # which goes by no other rank
        kind = GridWise.of_machines(world, min(local, dim))
    one, ids = table("T", rows, dim), torch.arange(rows)
    plan = Plan([one], world, {"T": kind})
    traffic = hb.dist.traffic_of([one], [{"T": ids}])
    sent = costs(world, traffic, local_world_size=local).of_table(one, plan.shardings["T"]).sent
    expected = counted(plan, local, ids)
    for what, of_ranks in zip(SENT, sent.tolist(), strict=True):
        assert of_ranks == pytest.approx(expected[what], rel=1e-9, abs=1e-9), what


def test_near_and_far_make_all() -> None:
    amounts = np.array([3.0, 0.0, 5.0, 7.0, 0.0, 2.0])
    alone = Topology.of(6, None).direct(amounts)
    assert Topology.of(6, 6) == Topology.of(6, 1) == Topology.of(6, None)
    for local in (2, 3):
        flow = Topology.of(6, local).direct(amounts)
        for split, whole in zip(flow, alone, strict=True):
            assert split.sum(0).tolist() == whole[0].tolist() and not whole[1].any()


@pytest.mark.parametrize(
    ("combiner", "kind", "near", "far"),
    [
        ("none", TableWise(0), 30 * 16 * 4, 30 * 16 * 4),  # rows of one rank; those of another
        ("none", "replicated", 30 * 8, 2 * 30 * 8),
        ("sum", TableWise(0), 100 * 16 * 4, 100 * 16 * 4),
    ],
)
def test_bytes_cost_by_distance(combiner: str, kind: Any, near: int, far: int) -> None:
    """What comes to a rank beside the owner, and to one on another machine, in a forward."""
    one = table("T", 1000, 16, combiner=combiner)
    ids = 300.0 if combiner == "sum" else 100.0
    traffic = {"T": hb.dist.Traffic(100, ids, 30, growth=0.0)}
    plan, at = Plan([one], 4, {"T": kind}), {"inside_byte": 1, "received_byte": 2}
    for unit, rank in at.items():
        rates = Rates.of([float(name == unit) for name in UNITS])
        predicting = costs(4, traffic, rates, local_world_size=2)
        received = predicting.of_table(one, plan.shardings["T"]).seconds[:, 0, rank].sum()
        assert received == (near if rank == 1 else far)


def test_a_plan_for_machines_counts_two_levels() -> None:
    tables = [table("T", 100_000, 16)]
    traffic = {"T": hb.dist.Traffic(1000, 1000, 900, growth=0.5)}
    slow = Rates.of(list(FORWARD.values()))
    one, two = (
        hb.plan(
            [hb.Table("T", 16, 100_000, sharding="row")], ranks, strategy=Measured(slow, traffic)
        )
        for ranks in (4, (2, 2))
    )
    assert one.cost is not None and two.cost is not None and two.cost.step < one.cost.step
    by_kind = dict(zip(SENT, two.cost.sent, strict=True))
    assert sum(by_kind["rows inside"]) == pytest.approx(4 * 450 * 16 * 4)
    assert sum(by_kind["rows"]) == pytest.approx(2 * 2**0.5 * 450 * 16 * 4)
    plan = Plan(tables, 4, {"T": RowWise()})
    again = hb.dist.predict(plan, Measured(slow, traffic, local_world_size=2)).cost
    assert again is not None and again.step == pytest.approx(two.cost.step)
    with pytest.raises(PlanError, match="local_world_size=3 does not divide the 4 ranks"):
        hb.dist.predict(plan, Measured(slow, traffic, local_world_size=3))
