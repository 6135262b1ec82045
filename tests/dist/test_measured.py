"""Plans by predicted costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from dist.placements import table, tables
from dist.test_new_sharding import Backwards
from dist.test_rates import SOME
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.dist import (
    ColumnWise,
    GridWise,
    Measured,
    Plan,
    PlanError,
    RowWise,
    TableWise,
    Traffic,
)
from hotbed.dist.measured import _is_better, _Key
from hotbed.dist.rates import UNITS
from hotbed.dist.strategies import STRATEGIES
from hotbed.sharding import KINDS

MEASURED = Measured(SOME)

shapes = st.lists(
    st.tuples(st.integers(1, 10**6), st.sampled_from([1, 7, 64])), min_size=1, max_size=6
)
prices = st.lists(st.floats(0, 1e-6), min_size=len(UNITS), max_size=len(UNITS)).map(
    hb.dist.Rates.of
)


@given(shapes, st.integers(1, 5), prices)
def test_no_named_strategy_is_predicted_to_be_faster(
    given: list[tuple[int, int]], world: int, rates: hb.dist.Rates
) -> None:
    strategy = Measured(rates)
    made = hb.plan(tables(*given), world, strategy=strategy)
    assert made.cost is not None and set(made.cost.strategies) == set(STRATEGIES)
    for name, step in made.cost.strategies.items():
        named = hb.dist.predict(hb.plan(tables(*given), world, strategy=name), strategy)
        assert named.cost is not None and named.cost.step == pytest.approx(step)
        assert made.cost.step <= step * (1 + 1e-9) + 1e-15
    again = hb.dist.predict(Plan(made.tables.values(), world, made.shardings), strategy)
    assert again.cost is not None and again.cost.step == pytest.approx(made.cost.step, rel=1e-6)


@pytest.mark.parametrize("ranks", [256, (32, 8)])
@pytest.mark.parametrize("ids", [1, 100])
def test_among_many_ranks_no_table_by_row_is_faster(ranks: Any, ids: int) -> None:
    shapes = [(3, 64), (2000, 64), (40_000, 64), (10**7, 64), (10**7, 64)]
    many = [dataclasses.replace(one, combiner="sum") for one in tables(*shapes)]
    traffic = {t.name: Traffic.assumed(t.rows or 0, ids_a_bag=ids) for t in many}
    strategy = Measured(SOME, traffic, local_world_size=None if ranks == 256 else 8)
    made = hb.plan(many, ranks, strategy=strategy, optimizer="adagrad")
    kinds = [RowWise()] if ranks == 256 else [RowWise(), GridWise.of_machines(256, 8)]
    for kind in kinds:
        uniform = Plan(many, 256, {one.name: kind for one in many}, sizes=made.sizes)
        cost = hb.dist.predict(uniform, strategy).cost
        assert made.cost is not None and cost is not None and made.cost.step <= cost.step
    assert min(made.cost.strategies.values()) > made.cost.step


def test_a_plan_that_fits_comes_before_a_shorter_step() -> None:
    keys = [_Key(0, 1.0, 1.0), _Key(0, 2.0, 1.0), _Key(0, 2.0, 2.0), _Key(5, 0.5, 0.1)]
    for at, key in enumerate(keys):
        assert [_is_better(key, other) for other in keys] == [at < n for n in range(len(keys))]


@settings(max_examples=examples(8))
@given(shapes, st.integers(1, 4), st.integers(10**3, 10**8))
def test_it_fits_where_any_named_plan_does(
    given: list[tuple[int, int]], world: int, memory: int
) -> None:
    def fits(strategy: Any) -> bool:
        try:
            made = hb.plan(tables(*given), world, strategy=strategy, memory=memory)
        except PlanError:
            return False
        return max(load.total for load in made.loads) <= memory

    assert fits(MEASURED) or not any(fits(name) for name in STRATEGIES)


def test_the_same_arguments_give_the_same_plan() -> None:
    made = tables((10**6, 64), (10**5, 32), (300, 16), (7, 4))
    first = hb.plan(made, 3, strategy=MEASURED, optimizer="adagrad")
    again = hb.plan(made, 3, strategy=Measured(SOME), optimizer="adagrad")
    other = hb.plan(made[::-1], 3, strategy=MEASURED, optimizer="adagrad")
    assert first == again and str(first) == str(again)
    assert first.cost and other.cost and other.cost.step == pytest.approx(first.cost.step)


@pytest.mark.parametrize("kind", ["replicated", "table", "row", "column", TableWise(3)])
def test_what_a_table_wants_it_gets(kind: Any) -> None:
    wanting = table("wanting", 1000, 8, sharding=kind)
    plan = hb.plan([*tables((100, 8), (10**6, 3)), wanting], 5, strategy=MEASURED)
    assert type(plan.shardings["wanting"]) is type(wanting.sharding)
    assert isinstance(kind, str) or plan.shardings["wanting"] == kind


def test_rowwise_optimizers_have_whole_rows() -> None:
    # Nothing but bytes of rows costs anything, of which columns share one table best.
    rates = hb.dist.Rates.of([float(name == "updated_byte") for name in UNITS])
    free = hb.plan(tables((4, 64)), 8, strategy=Measured(rates), optimizer="adagrad")
    assert isinstance(free.shardings["T0"], ColumnWise)
    whole = hb.plan(tables((4, 64)), 8, strategy=Measured(rates), optimizer="rowwise-adagrad")
    assert not isinstance(whole.shardings["T0"], ColumnWise)


def test_dynamic_tables_of_unknown_size_go_by_row() -> None:
    made = [table("user", None, 8), *tables((5, 5))]
    assert hb.plan(made, 4, strategy=MEASURED).shardings["user"] == RowWise("hash")
    hb.plan(made, 4, strategy=MEASURED, expected_rows={"user": 10**6})


def test_bytes_alone_are_shared_among_ranks() -> None:
    strategy = Measured(
        hb.dist.Rates.of([float("received" in name) for name in UNITS]),
        {"T0": Traffic(4096, 4096, 10, 0.0)},
    )
    steps = {
        "row": 5 * 8 + 5 * 64 + 5 * 64,  # half of ids, rows and gradients come to each rank
        "table": 10 * 64 + 10 * 64,  # the owner gets ids while the other one gets rows
        "replicated": 10 * 8 + 10 * 64,
    }
    one = tables((10, 16))
    for kind, step in steps.items():
        placed: Any = TableWise(1) if kind == "table" else kind
        cost = hb.dist.predict(Plan(one, 2, {"T0": placed}), strategy).cost
        assert cost is not None and cost.step == step
    assert isinstance(hb.plan(one, 2, strategy=strategy).shardings["T0"], RowWise)


def test_the_table_shows_why() -> None:
    traffic = {"T0": Traffic(2048, 40_960, 9000, 0.8)}
    plan = hb.plan(tables((10**6, 64), (50, 8)), 2, strategy=Measured(SOME, traffic))
    shown = plan.printed(120)
    assert plan.cost is not None
    assert "else, ms" in shown and plan.cost.tables["T0"].said in shown
    assert f"predicted to take {plan.cost.step * 1e3:.2f} ms; by auto" in shown
    assert "else, ms" not in str(hb.plan(tables((5, 5)), 2))


@given(st.integers(1, 9), st.integers(1, 70), st.integers(1, 50) | st.none(), st.randoms())
def test_candidates_can_be(dim: int, world: int, rows: int | None, random: Any) -> None:
    one, ranks = table("T", rows, dim), list(range(world))
    random.shuffle(ranks)
    for kind in KINDS.values():
        for each in kind.candidates(one, ranks):
            assert each.placed and not each.fault(one, world)


def test_a_kind_of_a_user_has_a_cost() -> None:
    plan = Plan(tables((100, 8)), 2, {"T0": Backwards()})
    cost = hb.dist.predict(plan, MEASURED).cost
    by_row = hb.dist.predict(Plan(tables((100, 8)), 2, {"T0": "row"}), MEASURED).cost
    assert cost is not None and by_row is not None and cost.step == pytest.approx(by_row.step)


def test_an_ssd_costs_its_reads() -> None:
    made = tables((10**6, 64))
    room = {"host": "20MB", "ssd": "1TB"}
    rates = dataclasses.replace(SOME, ssd_row=1e-4)
    spilled = hb.plan(made, 2, strategy=Measured(rates), storage=room)
    free = hb.plan(made, 2, strategy=Measured(rates))
    assert spilled.cost is not None and free.cost is not None
    assert spilled.cost.step > free.cost.step + 0.01
    assert np.isfinite(spilled.cost.of_ranks).all()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Measured("fast"), "expected rates such as"),
        (lambda: Measured(SOME, {"T0": 3}), "traffic of table 'T0' is 3"),
        (lambda: hb.plan(tables((5, 5)), 2, strategy="measured"), "needs a machine's figures"),
        (lambda: Measured(SOME, 5), "traffic must be a dict"),
        (lambda: hb.dist.predict("x", MEASURED), "expected a plan .*, got 'x'"),
        (lambda: hb.dist.predict(hb.plan(tables((5, 5)), 2), SOME), "expected a hotbed.dist.Meas"),
    ],
)
def test_what_cannot_be_is_told(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()


def test_tables_beyond_what_is_counted() -> None:
    for many in (tables((5, 5), (2**60, 4)), tables((2**59, 2), (2**60, 1))):
        with pytest.raises(PlanError, match="'T1': with it, tables have .* less than 2..63 bytes"):
            hb.plan(many, 2, strategy=MEASURED)
        with pytest.raises(PlanError, match="'T1'"):
            hb.dist.predict(hb.plan(many, 2), MEASURED)
    with pytest.raises(PlanError, match="'user'"):
        hb.plan([table("user", None, 4)], 2, strategy=MEASURED, expected_rows={"user": 2**62})
    large = table("T", 2**58, 4, sharding="replicated")
    with pytest.raises(PlanError, match="Rank 0 of 64 would keep 4.6 EB, which is 4.6 EB more"):
        hb.plan([large], 64, strategy=MEASURED, memory="1TB")
    assert sum(load.total for load in hb.plan([large], 64, strategy=MEASURED).loads) == 2**68


def test_remedies_of_a_measured_plan() -> None:
    with pytest.raises(PlanError, match="It would fit with") as error:
        hb.plan(tables((10**6, 64)), 2, strategy=MEASURED, memory="100MB")
    assert all(not any(hb.plan(**r.arguments).missing) for r in error.value.remedies)


def test_bags_are_pooled_as_ranks_do() -> None:
    one = table("T", 10**5, 64, combiner="sum")
    for ids, what in ((3, "rows"), (4, "vectors")):
        traffic = {"T": Traffic(100, 100 * ids, 100 * ids)}
        made = hb.dist.predict(Plan([one], 2, {"T": "row"}), Measured(SOME, traffic))
        assert made.cost is not None
        rows, vectors = made.cost.sent[1], made.cost.sent[2]
        assert (sum(rows) > 0, sum(vectors) > 0) == (what == "rows", what == "vectors")
