"""Plans: what each rank keeps, bytes, files, faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.placements import table, tables
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.dist import ColumnWise, Plan, PlanError, Replicated, RowWise, Sharding, TableWise
from hotbed.dist.strategies import STRATEGIES
from hotbed.tables import TablePart


@st.composite
def kinds(draw: Any, dim: int, world_size: int, dynamic: bool) -> Sharding:
    """A kind that fits."""
    match draw(st.integers(0, 3)):
        case 0:
            return Replicated()
        case 1:
            return TableWise(draw(st.integers(0, world_size - 1)))
        case 2:
            placements = (None, "hash", "modulo") if dynamic else (None, "modulo")
            return RowWise(draw(st.sampled_from(placements)))
    count = draw(st.integers(1, min(dim, world_size)))
    owners = tuple(draw(st.permutations(range(world_size)))[:count])
    if draw(st.booleans()):
        return ColumnWise(owners)
    cuts = sorted(draw(st.permutations(range(1, dim)))[: count - 1])
    begins = [0, *cuts, dim]
    return ColumnWise(owners, tuple(b - a for a, b in zip(begins, begins[1:], strict=False)))


@st.composite
def plans(draw: Any) -> Plan:
    world_size, given = draw(st.integers(1, 6)), {}
    made = []
    for at in range(draw(st.integers(1, 4))):
        dim, rows = draw(st.integers(1, 9)), draw(st.none() | st.integers(1, 20))
        made.append(table(f"T{at}", rows, dim, init=hb.init.Normal()))
        given[f"T{at}"] = draw(kinds(dim, world_size, rows is None))
    return Plan(made, world_size, given)


def cells(part: hb.Table, ids: torch.Tensor) -> set[tuple[int, int]]:
    """(id, column) in the whole table of all that a part keeps, as far as `ids` go."""
    origin = part.origin
    if part.rows is None:
        kept = ids if origin.owns is None else ids[origin.owns(ids)]
    else:
        kept = origin.ids_in_table(torch.arange(part.rows))
    columns = range(origin.column, origin.column + part.dim)
    return {(each, column) for each in kept.tolist() for column in columns}


@given(plans())
def test_the_parts_are_the_table_and_owners_have_them(plan: Plan) -> None:
    for name, whole in plan.tables.items():
        ids = torch.arange(whole.rows) if whole.rows else torch.arange(-30, 30) * 7919
        parts = [cells(plan.part(name, rank), ids) for rank in range(plan.world_size)]
        every = {(each, column) for each in ids.tolist() for column in range(whole.dim)}
        if plan.shardings[name] == Replicated():
            assert all(part == every for part in parts)
            assert plan.owner_of(name, ids, requester=plan.world_size - 1).unique().tolist() == [
                plan.world_size - 1
            ]
            continue
        assert sum(map(len, parts)) == len(every) and set().union(*parts) == every
        for column in range(whole.dim):
            for each, owner in zip(
                ids.tolist(), plan.owner_of(name, ids, column=column).tolist(), strict=True
            ):
                assert (each, column) in parts[owner]


@given(plans())
def test_local_rows_are_where_modulo_says(plan: Plan) -> None:
    for name, whole in plan.tables.items():
        if whole.rows is None or not isinstance(plan.shardings[name], RowWise):
            continue
        for each in range(whole.rows):
            part = plan.part(name, each % plan.world_size)
            assert part.origin.ids_in_table(each // plan.world_size) == each


@given(plans())
def test_bytes_add_up(plan: Plan) -> None:
    plan = Plan(
        list(plan.tables.values()),
        plan.world_size,
        plan.shardings,
        sizes=hb.plan([table("x", 1, 1)], 1, optimizer="rowwise-adam").sizes,
    )
    for rank, load in enumerate(plan.loads):
        parts = [plan.part(name, rank) for name in plan.tables]
        # Adam's first moment as wide as a row, and its second one number a row.
        assert load.total == sum((p.rows or 0) * (4 * p.dim + 4 * (p.dim + 1)) for p in parts)


def test_what_a_rank_keeps_is_a_table_or_a_part_of_one() -> None:
    made = [table("whole", 10, 4), table("cut", 10, 4, padding_idx=3), table("user", None, 4)]
    plan = Plan(made, 2, {"whole": TableWise(1), "cut": "row", "user": ColumnWise((1,))})
    assert plan.part("whole", 1) is made[0]
    nothing, cut, wide = plan.part("whole", 0), plan.part("cut", 1), plan.part("user", 0)
    assert isinstance(nothing, TablePart) and (nothing.rows, nothing.dim) == (0, 4)
    assert isinstance(cut, TablePart) and (cut.rows, cut.padding_idx) == (5, 1)
    assert wide.rows is None and wide.origin.owns is not None
    assert not wide.origin.owns(torch.arange(100)).any()


@pytest.mark.parametrize("optimizer", hb.optim.RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes_are_those_of_live_tables(optimizer: Any, dtype: torch.dtype) -> None:
    static = table("T", 50_000, 6, dtype=dtype)
    plan = hb.plan([static], 1, optimizer=optimizer)
    model = hb.EmbeddingCollection([static])
    optimizer(model.parameters(), lr=0.1)
    (live,) = model._owned.values()
    assert plan.loads[0].total == live.core.plane_bytes
    assert hb.plan([static], 1, optimizer=optimizer._rule.command).loads == plan.loads


def test_bytes_of_a_dynamic_table_are_about_those_of_a_live_one() -> None:
    model = hb.EmbeddingCollection([hb.Table("user", 8)])
    model({"user": torch.arange(100_000) * 7919})
    (live,) = model._owned.values()
    plan = hb.plan(model, 1, expected_rows={"user": 100_000})
    live_bytes = live.core.plane_bytes + live.core.index_bytes
    assert 0.8 * plan.loads[0].total < live_bytes <= 1.05 * plan.loads[0].total


def test_tiers_fill_from_the_top() -> None:
    made = [table("T", 1000, 10), table("user", None, 10)]
    rows = {"user": 1000}
    full = {"device": 30_000, "host": 60_000, "ssd": 50_000}
    plan = hb.plan(made, 1, expected_rows=rows, storage=full)
    # 80,000 of rows and 36,000 of indices, which lie in the host's memory: 24,000 rows fit beside them.
    filled = plan.tiers.filled(plan.loads[0])
    assert filled == ({"device": 30_000, "host": 60_000, "ssd": 26_000}, 0)
    assert "26.0 kB" in str(plan) and "~1,000" in str(plan)
    storage = hb.Storage(device=30_000, host=60_000, ssd="somewhere")
    assert hb.plan(made, 1, expected_rows=rows, storage=storage).loads == plan.loads
    assert "Nobody said how many rows to expect of user" in str(hb.plan(made, 1))


# -- files -----------------------------------------------------------------------------------------


@given(plans())
def test_what_is_written_is_read(tmp_path_factory: Any, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    plan.write(path)
    again = Plan.read(path, reversed(list(plan.tables.values())))
    assert again == plan and again.digest == plan.digest and again.shardings == plan.shardings


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_name_can_be_written(tmp_path_factory: Any, name: str) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    plan = hb.plan([table(name, 5, 5)], 2)
    plan.write(path)
    assert Plan.read(path, plan.tables.values()) == plan


HEAD = "version = 1\nworld_size = 4\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "keys version and world_size"),
        ("version = 1", "keys version"),
        (HEAD + "tables = 3", "keys version"),
        ("\x00", "is not TOML"),
        ("\xff", "is not TOML"),
        (HEAD + "[tables.T]\nsharding = 'row'\n[tables.T]\nsharding = 'row'", "is not TOML"),
        ("version = 2\nworld_size = 4\n[tables]", "version 2 is not 1"),
        ("version = 1.0\nworld_size = 4\n[tables]", "version 1.0 is not 1"),
        ("version = true\nworld_size = 4\n[tables]", "version True is not 1"),
        (HEAD + "more = 1\n[tables]", "key 'more' is unknown"),
        ("version = 1\nworld_size = 0\n[tables.T]\nsharding='row'", "world_size must be"),
        ("version = 1\nworld_size = 'a'\n[tables.T]\nsharding='row'", "not 'a'"),
        ("version = 1\nworld_size = 99999999\n[tables.T]\nsharding='row'", "from 1 to 1,048,576"),
        (HEAD + "[tables]", "Table 'T' is missing"),
        (HEAD + "[tables]\nT = 3", "'T' is 3"),
        (HEAD + "[tables.T]", "'T': sharding must be one of .* not None"),
        (HEAD + "[tables.T]\nsharding = ['row']", "'T': sharding must be one of"),
        (HEAD + "[tables.T]\nsharding = 'rows'", "not 'rows'"),
        (HEAD + "[tables.T]\nsharding = 'row'\nowner = 3", "unknown key 'owner'.* placement"),
        (HEAD + "[tables.T]\nsharding = 'replicated'\nowner = 3", "has no more keys"),
        (HEAD + "[tables.T]\nsharding = 'row'\nplacement = 'mod'", "'T': .*'mod'"),
        (HEAD + "[tables.T]\nsharding = 'row'\nplacement = 'hash'", "'T': .*dynamic"),
        (HEAD + "[tables.T]\nsharding = 'row'\nplacement = ['x']", "'T': "),
        (HEAD + "[tables.T]\nsharding = 'table'", "'T': no rank is named"),
        (HEAD + "[tables.T]\nsharding = 'table'\nowner = 1\nkeeper = 2", "earlier and its present"),
        (HEAD + "[tables.T]\nsharding = 'table'\nowner = 4", r"'T': rank 4 is outside \[0, 4\)"),
        (HEAD + "[tables.T]\nsharding = 'table'\nowner = -1", "'T': .*not -1"),
        (HEAD + "[tables.T]\nsharding = 'table'\nowner = 1.0", "not 1.0"),
        (HEAD + "[tables.T]\nsharding = 'table'\nowner = true", "not True"),
        (HEAD + "[tables.T]\nsharding = 'column'", "'T': no rank is named"),
        (HEAD + "[tables.T]\nsharding = 'column'\nowners = 1", "several numbers, not 1"),
        (HEAD + "[tables.T]\nsharding = 'column'\nowners = []", "distinct ranks"),
        (HEAD + "[tables.T]\nsharding = 'column'\nowners = [1, 1]", "distinct ranks"),
        (HEAD + "[tables.T]\nsharding = 'column'\nowners = [0, 9]", "rank 9 is outside"),
        (HEAD + "[tables.T]\nsharding = 'column'\nowners = [0,1,2,3]", "4 ranks .* it has 3"),
        (HEAD + "[tables.T]\nsharding = 'column'\nowners = [0,1]\nwidths = [1,1]", "2 columns"),
        (HEAD + "[tables.T]\nsharding = 'column'\nowners = [0,1]\nwidths = [3]", "2 positive"),
        (HEAD + "[tables.T]\nsharding = 'column'\nowners = [0,1]\nwidths = [3,0]", "2 positive"),
        (HEAD + "[tables.T]\nsharding = 'column'\nwidths = [3]", "need owners"),
        (
            HEAD + "[tables.T]\nsharding='row'\n[tables.X]\nsharding='row'",
            "'X', which the model has",
        ),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=says) as error:
        Plan.read(path, [table("T", 5, 3)])
    assert str(path) in str(error.value)
    with pytest.raises(PlanError, match="No such file"):
        Plan.read(tmp_path / "none.toml", [table("T", 5, 3)])


@given(plans(), st.data())
def test_a_damaged_file_is_a_plan_or_an_error(tmp_path_factory: Any, plan: Plan, data: Any) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    plan.write(path)
    text = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=3))
    path.write_bytes(bytes(text))
    try:
        Plan.read(path, plan.tables.values())
    except PlanError as error:
        assert str(path) in str(error)


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: Plan(t, 2, {"T0": "row"}), "'T1' is missing"),
        (lambda t: Plan(t, 2, {"T0": "row", "T1": "row", "X": "row"}), "'X', which the model"),
        (lambda t: Plan(t, 2, {"T0": "row", "T1": "rows"}), "'T1': .*not 'rows'"),
        (lambda t: Plan(t, 2, {"T0": "row", "T1": "table"}), "'T1': no rank is named"),
        (lambda t: Plan(t, 2, {"T0": "row", "T1": TableWise(2)}), "'T1': rank 2 is outside"),
        (lambda t: Plan(t, 2, ["row", "row"]), "must be a dict"),
        (lambda t: Plan([*t, t[0]], 2, {}), "Two tables are named 'T0'"),
        (lambda t: Plan([*t, "x"], 2, {}), "must be hotbed.Table, not 'x'"),
        (lambda t: Plan([], 2, {}), "at least one table"),
        (lambda t: Plan(5, 2, {}), "must be several hotbed.Table, not 5"),
        (lambda t: hb.plan(t, 2).part(["T0"], 0), r"no table \['T0'\]"),
        (lambda t: hb.plan(t, 2, optimizer=hb.dist.States(-100, 0)), "per_column .* not -100"),
        (lambda t: hb.dist.States(0, 1.5), "States: per_row must be a number .* not 1.5"),
        (lambda t: hb.dist.States(10**30), "per_column must be a number from 0 to 1,048,576"),
        (lambda t: Plan(t, True, {}), "world_size .* not True"),
        (lambda t: hb.plan(t, 2).part("X", 0), "no table 'X'"),
        (lambda t: hb.plan(t, 2).part("T0", 2), r"Rank 2 is outside \[0, 2\)"),
        (lambda t: hb.plan(t, 2).owner_of("T0", torch.arange(3), column=3), "column 3 is outside"),
        (lambda t: hb.plan(t, 2, strategy="memory_optimised"), "Did you mean 'memory_optimized'"),
        (lambda t: hb.plan(t, 2, strategy="zzz"), "There are auto, basic"),
        (lambda t: hb.plan(t, 2, row_slice_threshold=0), "row_slice_threshold .* not 0"),
        (lambda t: hb.plan(t, 2, column_slice_threshold=1.5), "column_slice_threshold .* not 1.5"),
        (lambda t: hb.plan(t, 2, optimizer="adagrat"), "not 'adagrat'"),
        (lambda t: hb.plan(t, 2, optimizer=torch.optim.Adam), "optimizer must be one of"),
        (lambda t: hb.plan(t, 2, expected_rows={"T0": 3}), "'T0' is no dynamic table"),
        (lambda t: hb.plan([hb.Table("u", 4)], 2, expected_rows={"u": -1}), "cannot have -1"),
        (lambda t: hb.plan(t, 2, memory="8GB", storage={"host": 3}), "not both"),
        (lambda t: hb.plan(t, 2, storage={"hots": 3}), "storage must be"),
        (lambda t: hb.plan(t, 2, storage={"host": "much"}), "size is a number"),
        (lambda t: hb.plan(t, 2, memory=0), "'memory' is 0; give what it holds, or leave it out"),
        (lambda t: hb.plan(t, 2, storage={"device": "0GB", "host": 9}), "'device' is '0GB'"),
        (lambda t: hb.plan(t, 2, storage={"ssd": "1TB"}), "needs a host"),
        (lambda t: hb.plan(t[0], 2), "for a list of hotbed.Table or for a module"),
        (lambda t: hb.plan("T0", 2), "for a list of hotbed.Table"),
        (lambda t: hb.plan(torch.nn.Linear(2, 2), 2), "Linear has no tables"),
        (lambda t: hb.plan([table("T", 5, 2, sharding=TableWise(7))], 2), "rank 7 is outside"),
    ],
)
def test_what_cannot_be_a_plan(make: Callable[[list[hb.Table]], Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make(tables((5, 3), (6, 3)))


def test_a_sharding_that_is_none_is_told_with_the_table() -> None:
    for wrong in ("rows", 3, RowWise):
        with pytest.raises(hb.TableError, match="'T': A sharding is"):
            table("T", 5, 2, sharding=wrong)


def test_a_table_keeps_its_wish_as_a_kind() -> None:
    plain, wishing = table("T", 5, 2), table("T", 5, 2, sharding="column")
    assert plain.sharding is None and wishing.sharding == ColumnWise()
    assert dataclasses.replace(wishing, rows=6).sharding == ColumnWise()
    assert repr(plain) == repr(wishing) and hash(wishing) != hash(plain)
    rows = [hb.EmbeddingCollection([t], seed=3).rows("T").values for t in (plain, wishing)]
    assert torch.equal(*rows)


# -- when nothing fits -----------------------------------------------------------------------------

tight = st.lists(
    st.tuples(st.integers(1, 10**7), st.sampled_from([1, 8, 64, 128])), min_size=1, max_size=8
)


@given(
    tight,
    st.integers(1, 8),
    st.integers(10**3, 10**9),
    st.sampled_from([None, "adagrad", "adam", "ftrl", hb.optim.Adam, hb.dist.States(3, 1)]),
    st.sampled_from(list(STRATEGIES)),
    st.booleans(),
)
def test_remedies_remedy(
    shapes: list[tuple[int, int]],
    world_size: int,
    memory: int,
    optimizer: Any,
    strategy: str,
    tiered: bool,
) -> None:
    room: dict[str, Any] = (
        {"storage": {"host": memory, "ssd": 2 * memory}} if tiered else {"memory": memory}
    )
    try:
        plan = hb.plan(tables(*shapes), world_size, optimizer=optimizer, strategy=strategy, **room)
    except PlanError as error:
        assert len(error.remedies) <= 3
        for remedy in error.remedies:
            assert remedy.said in str(error)
            assert not any(hb.plan(**remedy.arguments).missing)
    else:
        most = memory * (3 if tiered else 1)
        assert max(load.total for load in plan.loads) <= most


def remedies(*arguments: Any, **more: Any) -> list[str]:
    with pytest.raises(PlanError) as error:
        hb.plan(*arguments, **more)
    return [remedy.said for remedy in error.value.remedies]


def test_the_cheapest_remedies_come_first() -> None:
    # 4 ranks hold 4 GB; 10**7 x 64 float32 are 2.56 GB, with Adagrad's sums 5.12 GB.
    large = table("item", 10**7, 64)
    assert remedies([large], 4, optimizer="adagrad", memory="1GB") == [
        "the optimizer rowwise-adagrad, which saves 2.5 GB on all ranks together",
        "rows of bfloat16, which saves 1.3 GB on all ranks together",
        "an SSD of 290.0 MB a rank",  # 0.28 GB and 4 bytes a row of index in memory
    ]
    assert remedies([dataclasses.replace(large, sharding=TableWise(0))], 4, memory="1GB") == [
        "table 'item' cut by row (sharding=\"row\")",
        "an SSD of 1.6 GB a rank",
    ]
    assert remedies([large], 4, memory="0.5GB")[-1] == "6 ranks instead of 4"
    others = tables((5, 5), (6, 5), (7, 5))
    assert remedies([large, *others], 4, strategy="basic", memory="2GB")[:2] == [
        'strategy "auto"',
        "table 'item' cut by row (sharding=\"row\")",
    ]


def test_nothing_to_be_done_is_said() -> None:
    small = hb.Table("T", 1, 1000, sharding="replicated")
    with pytest.raises(PlanError, match="No change helps alone"):
        hb.plan([small], 1, memory=1_900)
    wide = table("T", 1, 2**22, sharding="replicated")
    with pytest.raises(PlanError, match="No other plan fits into so little: give each rank more"):
        hb.plan([wide], 1, storage={"host": 1, "ssd": 10})


def test_names_do_nothing_to_a_terminal() -> None:
    tables = [hb.Table("red\x1b[31m", 4, 1000), hb.Table("\u9999\r", 4)]
    shown = str(hb.plan(tables, 2))
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert r"red\x1b[31m" in shown and r"\r: they count 0 bytes" in shown
    shown = repr(hb.EmbeddingCollection(tables))
    assert r"(red\x1b[31m): 1,000 rows" in shown and "\r" not in shown


def test_names_of_before_warn_and_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(
        "version = 1\nworld_size = 4\n[tables.a]\nsharding = 'table'\nkeeper = 3\n"
        "[tables.b]\nsharding = 'column'\nkeepers = [2, 0]\n"
    )
    plan = Plan.read(path, [hb.Table("a", 4, rows=9), hb.Table("b", 4, rows=9)])
    assert plan.shardings == {"a": TableWise(3), "b": ColumnWise((2, 0), (2, 2))}
    old: list[Callable[[], object]] = [
        lambda: plan.keeper_of("a", [1]).tolist() == [3],
        lambda: TableWise(3).keeper == 3,
        lambda: TableWise(keeper=3) == TableWise(3),  # type: ignore[call-arg]
        lambda: ColumnWise(keepers=(2, 0)) == ColumnWise((2, 0)),  # type: ignore[call-arg]
        lambda: ColumnWise((2, 0)).keepers == (2, 0),
        lambda: hb.dist.hashed_keeper is hb.dist.hashed_owner,
        lambda: hb.dist.modulo_keeper is hb.dist.modulo_owner,
    ]
    for says in old:
        with pytest.warns(DeprecationWarning, match="owner") as warned:
            assert says()
        assert warned[0].filename == __file__
