"""The strategies against placements worked out by hand, against an oracle, and their bounds."""

from __future__ import annotations

import dataclasses
import random

import pytest
from dist.placements import expected_columns, kept_columns, table, tables
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.dist import ColumnWise, Replicated, RowWise, TableWise
from hotbed.dist.strategies import ALL_REPLICATED_BYTES, REPLICATED_BYTES, STRATEGIES

BY_ELEMENTS = ("basic", "memory_balanced", "memory_optimized")

# dist_model_parallel_test.py of NVIDIA-Merlin/distributed-embeddings, [rows, dim] of each table.
LARGE = [
    *[(2, 8), (2, 16), (10, 8), *[(10, 16)] * 5, (10, 32), *[(10, 128)] * 4, (10, 1024)],
    *[(100, 16), *[(100, 32)] * 4, *[(100, 128)] * 2, *[(1000, 16)] * 2, (1000, 48)],
    *[*[(1000, 128)] * 2, (1000, 384), *[(10000, 64)] * 2, (10000, 2048), (100000, 32)],
    *[*[(100000, 64)] * 3, (100000, 128), (1000000, 96), *[(1000000, 128)] * 2],
    *[(9999999, 8), (10000000, 8), (10000001, 8)],
]
shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15)), min_size=1, max_size=12)


def columns_by_rank(
    shapes: list[tuple[int, int]], world_size: int, strategy: str, threshold: int | None = None
) -> list[dict[int, range]]:
    plan = hb.plan(tables(*shapes), world_size, strategy=strategy, column_slice_threshold=threshold)
    return kept_columns(plan)


def test_column_slice_merge() -> None:
    # 800, 40, 80 and 100 elements; at most 45 a slice: 800 wants 32 slices and gets 4 of 200 (4 ranks),
    # 80 gets 2 of 40, 100 gets 4 of 25. Falling: 200 x 4, 40 (T2, T2, T1), 25 x 4.
    # Up: ranks 0 to 3 take T0 each; down: 3, 2, 1 take T2, T2, T1 and 0 T3; up: 0, 1, 2 take T3.
    kept = columns_by_rank([(100, 8), (5, 8), (10, 8), (25, 4)], 4, "memory_balanced", 45)
    assert kept == [
        {0: range(0, 2), 3: range(0, 2)},  # both slices of T3 are one
        {0: range(2, 4), 1: range(0, 8), 3: range(2, 3)},
        {0: range(4, 6), 2: range(0, 4), 3: range(3, 4)},
        {0: range(6, 8), 2: range(4, 8)},
    ]


def test_column_slice_dup_worker() -> None:
    # 40, 22, 8, 8 elements, at most 10: 2 slices of 20 and 2 of 11 on two ranks.
    # Falling: T0, T0, T1, T1, T3, T2: up 0, 1; down 1, 0; up 0, 1.
    kept = columns_by_rank([(10, 4), (11, 2), (4, 2), (4, 2)], 2, "memory_balanced", 10)
    assert kept == [
        {0: range(0, 2), 1: range(0, 1), 3: range(0, 2)},
        {0: range(2, 4), 1: range(1, 2), 2: range(0, 2)},
    ]


def test_eight_tables_of_width_two() -> None:
    # 20, 22, 8, 8 twice; falling: T5, T1, T4, T0, T7, T6, T3, T2, four ranks up and down.
    kept = columns_by_rank([(10, 2), (11, 2), (4, 2), (4, 2)] * 2, 4, "memory_balanced")
    assert [sorted(of_rank) for of_rank in kept] == [[2, 5], [1, 3], [4, 6], [0, 7]]


def test_fewer_tables_than_workers() -> None:
    # 1000 elements on 4 ranks: halves, quarters and so on until there are 4 pieces, at most 499 a slice:
    # 1000 / 4 = 250.
    kept = columns_by_rank([(100, 10)], 4, "memory_balanced")
    assert kept == [{0: range(0, 3)}, {0: range(3, 6)}, {0: range(6, 8)}, {0: range(8, 10)}]


def test_basic_goes_round_in_the_order_of_the_tables() -> None:
    kept = columns_by_rank([(11, 7), (5, 8), (3, 8), (5, 8), (12, 25)], 2, "basic")
    assert [sorted(of_rank) for of_rank in kept] == [[0, 2, 4], [1, 3]]


def test_memory_optimized_gives_the_largest_to_the_least_loaded() -> None:
    # 60, 50, 40, 30, 20, 10: 0 has 60; 1 has 50, 40; 0 has 60, 30; both have 90: 0 gets 20, 1 gets 10.
    kept = columns_by_rank([(10, d) for d in (6, 5, 4, 3, 2, 1)], 2, "memory_optimized")
    assert [sorted(of_rank) for of_rank in kept] == [[0, 3, 4], [1, 2, 5]]


@pytest.mark.parametrize("strategy", BY_ELEMENTS)
def test_all_parallelism_modes(strategy: str) -> None:
    plan = hb.plan(
        tables(*LARGE),
        8,
        strategy=strategy,
        data_parallel_threshold=10_000,
        column_slice_threshold=1_000_000,
        row_slice_threshold=10_000_000,
    )
    kinds = [plan.shardings[f"T{at}"] for at in range(len(LARGE))]
    for (rows, dim), kind in zip(LARGE, kinds, strict=True):
        if rows * dim <= 10_000:
            assert kind == Replicated()
        elif rows * dim >= 10_000_000:
            assert isinstance(kind, RowWise)
        else:
            assert isinstance(
                kind, ColumnWise if rows * dim > 1_000_000 else TableWise | ColumnWise
            )
    left = [shape for shape in LARGE if 10_000 < shape[0] * shape[1] < 10_000_000]
    assert len(LARGE) == 41 and left == [
        *[(10, 1024), *[(100, 128)] * 2, *[(1000, 16)] * 2, (1000, 48), *[(1000, 128)] * 2],
        *[(1000, 384), *[(10000, 64)] * 2, (100000, 32), *[(100000, 64)] * 3],
    ]
    chosen = [kind for kind in kinds if isinstance(kind, TableWise | ColumnWise)]
    expected = expected_columns(left, strategy, 8, 1_000_000)
    for at, kind in enumerate(chosen):
        ranks = kind.owners if isinstance(kind, ColumnWise) else (kind.owner,)
        assert ranks == tuple(r for r in range(8) if at in expected[r])


@given(shapes, st.integers(1, 9), st.sampled_from(BY_ELEMENTS), st.none() | st.integers(1, 300))
def test_placement_is_that_of_the_reference(
    shapes: list[tuple[int, int]], world_size: int, strategy: str, threshold: int | None
) -> None:
    expected = expected_columns(shapes, strategy, world_size, threshold)
    assert columns_by_rank(shapes, world_size, strategy, threshold) == expected


@given(shapes, st.integers(1, 9))
def test_balanced_counts_and_memory(shapes: list[tuple[int, int]], world_size: int) -> None:
    plan = hb.plan(tables(*shapes), world_size, strategy="memory_optimized")
    loads = [load.total for load in plan.loads]
    largest = max(
        part.rows * part.dim * 4
        for rank in range(world_size)
        for name in plan.tables
        if (part := plan.part(name, rank)).rows is not None
    )
    assert max(loads) <= sum(loads) / world_size + largest


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_keeps_all(strategy: str) -> None:
    plan = hb.plan(
        [*tables((3, 4), (5, 6)), table("user", None, 4)],
        1,
        strategy=strategy,
        row_slice_threshold=1,
        data_parallel_threshold=30,
        column_slice_threshold=1,
    )
    assert set(plan.shardings.values()) == {TableWise(0)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "kind", ["replicated", "table", "row", "column", TableWise(3), ColumnWise((4, 1), (7, 1))]
)
@pytest.mark.parametrize("rows", [1, 1000, None])
def test_what_a_table_wants_it_gets(strategy: str, kind: str, rows: int | None) -> None:
    wanting = table("wanting", rows, 8, sharding=kind)
    plan = hb.plan(
        [*tables((100, 8), (1, 1), (1000, 3)), wanting],
        5,
        strategy=strategy,
        row_slice_threshold=800,
        data_parallel_threshold=10,
        column_slice_threshold=100,
        expected_rows={"wanting": 77} if rows is None else None,
    )
    given, chosen = wanting.sharding, plan.shardings["wanting"]
    assert type(chosen) is type(given)
    if not isinstance(kind, str):
        assert chosen == given


def test_the_wanted_ranks_count_when_others_are_placed() -> None:
    wanting = table("wanting", 1000, 8, sharding=TableWise(0))
    for strategy in ("auto", "memory_optimized"):
        small = tables((100_000, 8), (100_000, 8))
        wanting = dataclasses.replace(wanting, rows=10**7)
        plan = hb.plan([wanting, *small], 2, strategy=strategy)
        assert {plan.shardings[t.name] for t in small} == {TableWise(1)}


def test_dynamic_tables_are_cut_by_row() -> None:
    for strategy in STRATEGIES:
        plan = hb.plan([table("user", None, 8), *tables((5, 5))], 4, strategy=strategy)
        assert plan.shardings["user"] == RowWise("hash")


big_shapes = st.lists(
    st.tuples(st.integers(1, 10**9), st.sampled_from([1, 7, 64, 256])), min_size=1, max_size=30
)


@given(big_shapes, st.integers(1, 70), st.sampled_from(["sgd", "adagrad", "rowwise-adam"]))
def test_auto_keeps_ranks_within_a_quarter(
    shapes: list[tuple[int, int]], world_size: int, optimizer: str
) -> None:
    plan = hb.plan(tables(*shapes), world_size, optimizer=optimizer)
    loads = [load.total for load in plan.loads]
    of_a_row = [plan.sizes.load_of(t, 1, t.dim).total for t in plan.tables.values()]
    # Of tables that do not divide, some ranks have a row or a column more.
    crumbs = sum(of_a_row) + sum(world_size * size for size in of_a_row)
    assert max(loads) <= 1.25 * sum(loads) / world_size + crumbs


def test_auto_replicates_what_is_small_and_not_too_much_of_it() -> None:
    rows = REPLICATED_BYTES // (64 * 4)
    plan = hb.plan(tables((rows, 64), (rows + 1, 64), (1, 1)), 4)
    assert [plan.shardings[f"T{at}"] == Replicated() for at in range(3)] == [True, False, True]
    plan = hb.plan(tables(*[(rows, 64)] * 200), 4)
    replicated = sum(kind == Replicated() for kind in plan.shardings.values())
    assert replicated == ALL_REPLICATED_BYTES // REPLICATED_BYTES


def test_auto_does_not_ask_for_the_order() -> None:
    made = tables(*LARGE)
    first = hb.plan(made, 8, optimizer="adam")
    for seed in range(5):
        random.Random(seed).shuffle(made)
        assert hb.plan(made, 8, optimizer="adam") == first


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_is_made_twice_the_same(strategy: str) -> None:
    first, second = (hb.plan(tables(*LARGE), 16, strategy=strategy) for _ in range(2))
    assert first == second and first.digest == second.digest and str(first) == str(second)
    other = [dataclasses.replace(t, rows=(t.rows or 0) + 1) for t in tables(*LARGE)]
    assert hb.plan(other, 16, strategy=strategy).digest != first.digest
