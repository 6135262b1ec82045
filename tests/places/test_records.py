"""All rows of a table one chunk after the other: each once, as of one step, wherever they lie."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import kept_in
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_in import PLACES, collection, step
from torch import Tensor

import hotbed as hb
from hotbed.places import core_backed
from hotbed.table.lookups import records_of
from hotbed.table.records import Records

pytestmark = pytest.mark.filterwarnings("default:The budget holds:UserWarning")

TABLES = hb.Table("item", 48, 400), hb.Table("user", 40, dtype=torch.float16)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_backed, "rows_at_once", lambda core: 37)


def batch_of(number: int, ids: int = 60) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(number)
    return {
        "item": torch.randint(0, 400, (ids,), generator=chance),
        "user": torch.randint(0, 700, (ids,), generator=chance) * 10**12 - 5,
    }


def trained(place: str, folder: Path, steps: int = 12, **options: Any) -> tuple[Any, Any]:
    model = collection(place, folder, *TABLES)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1, **options)
    for number in range(steps):
        step(model, optimizer, batch_of(number))
    return model, optimizer


def by_id(table: Any, **options: Any) -> dict[int, list[Tensor]]:
    """Everything that a stream tells of a row, by id. Each id comes once."""
    found: dict[int, list[Tensor]] = {}
    for ids, weights, states, steps in table.records(**options):
        assert len(ids) <= 37
        parts = [weights, *(states or ()), *(() if steps is None else (steps,))]
        for at, row in enumerate(ids.tolist()):
            assert row not in found
            found[row] = [part[at].clone() for part in parts]
    return found


def equal(one: dict[int, list[Tensor]], other: dict[int, list[Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        all(map(torch.equal, parts, other[row])) for row, parts in one.items()
    )


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("place", PLACES)
def test_rows_and_states_are_those_that_are_told_by_id(
    tmp_path: Path, place: str, untouched: str
) -> None:
    model, optimizer = trained(place, tmp_path, untouched=untouched)
    expected, _ = trained("memory", tmp_path, untouched=untouched)
    states = optimizer.state_dict()["state"]
    if place not in ("memory", "budget"):  # some rows do lie below
        assert model.stats()["rows_to_host" if place == "host" else "rows_to_ssd"] > 0
    for number, name in enumerate(model.tables):
        table = model.table(name)
        found = by_id(table)
        ids = torch.tensor(sorted(found))
        assert torch.equal(table.lookup(ids), torch.stack([found[i][0] for i in ids.tolist()]))
        kept = states[number]
        assert ids.tolist() == kept["ids"].tolist()
        for k, state in enumerate(table.core.state_names):
            assert torch.equal(kept[state], torch.stack([found[i][1 + k] for i in ids.tolist()]))
        in_memory = by_id(expected.table(name))
        assert found.keys() <= in_memory.keys()
        assert equal(found, {row: in_memory[row] for row in found})
        assert {*found} == {*in_memory} or table.spec.rows is not None


@pytest.mark.parametrize("place", PLACES)
def test_tables_that_lie_together_come_in_one_pass(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_in, "AROUND", 320_000)
    model = collection(place, tmp_path, *TABLES, hb.Table("word", 48), hb.Table("empty", 48))
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1)
    for number in range(12):
        ids = batch_of(number)
        none = hb.Jagged(
            torch.empty(0, dtype=torch.int64), lengths=torch.zeros(60, dtype=torch.int64)
        )
        step(model, optimizer, {**ids, "word": ids["item"] * 3, "empty": none})
    names = ["word", "user", "empty", "item"]
    tables = [model.table(name) for name in names]
    found: dict[str, dict[int, list[Tensor]]] = {name: {} for name in names}
    for table, (ids, weights, states, _) in records_of(tables):
        assert 0 < len(ids) <= 37
        for at, row in enumerate(ids.tolist()):  # type: ignore[attr-defined]
            assert row not in found[table.name]
            found[table.name][row] = [part[at] for part in (weights, *(states or ()))]
    for table in tables:
        assert equal(found[table.name], by_id(table))
        assert (table.name == "empty") != bool(found[table.name])


@pytest.mark.parametrize("place", PLACES)
def test_raw_rows_have_the_step_that_they_are_of(tmp_path: Path, place: str) -> None:
    model, optimizer = trained(place, tmp_path, untouched="exact", steps=6)
    last: dict[int, int] = {}
    for number in range(6):
        last |= dict.fromkeys(batch_of(number)["user"].tolist(), number + 1)
    raw = by_id(model.table("user"), current=False)
    assert {row: int(parts[-1]) for row, parts in raw.items()} == last
    assert all(int(parts[-1]) == 6 for parts in by_id(model.table("user")).values())


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_no_batch_met_come_along_where_steps_move_them(
    tmp_path: Path, place: str
) -> None:
    model = collection(place, tmp_path, *TABLES)
    optimizer = hb.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, untouched="exact")
    for number in range(3):
        step(model, optimizer, batch_of(number))
    found = by_id(model.table("item"))
    assert sorted(found) == list(range(400))
    rows = torch.stack([found[row][0] for row in range(400)])
    assert torch.equal(rows, model.rows("item").values)
    assert torch.equal(rows, model.state_dict()["item"])


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_a_table_goes_from_place_to_place_and_trains_on(
    tmp_path: Path, source: str, target: str
) -> None:
    model, _ = trained(source, tmp_path / "of", untouched="exact")
    other = collection(target, tmp_path / "to", *TABLES)
    rules = hb.optim.Adam(other.parameters(), lr=0.1, untouched="exact")
    for number in range(12):  # so that both have the same history
        step(other, rules, batch_of(number))
    for name in model.tables:
        table = other.table(name)
        table.forget_rows()
        for chunk in model.table(name).records(current=False):
            table.place.write(chunk)
    for name in model.tables:
        some = torch.cat([batch_of(n)[name] for n in range(14)])
        assert torch.equal(model.lookup(name, some), other.lookup(name, some))


@pytest.mark.parametrize("place", PLACES)
def test_weights_alone_leave_states_and_states_alone_weights(tmp_path: Path, place: str) -> None:
    model, _ = trained(place, tmp_path)
    table = model.table("user")
    before = by_id(table)
    some = torch.tensor([*before])[::3]
    table.place.write(Records(some, torch.full((len(some), 40), 2.0)))
    after = by_id(table)
    for row in before:
        weights, *states = after[row]
        assert all(map(torch.equal, states, before[row][1:]))
        written = row in some.tolist()
        assert torch.equal(weights, torch.full_like(weights, 2) if written else before[row][0])
    zeros = [torch.zeros(len(some), width) for width in table.core.state_widths()]
    table.place.write(Records(some, states=zeros))
    for row in some.tolist():
        weights, *states = by_id(table)[row]
        assert not any(state.any() for state in states) and (weights == 2).all()


@pytest.mark.parametrize("place", PLACES)
def test_what_would_change_rows_waits_or_is_refused(tmp_path: Path, place: str) -> None:
    model, optimizer = trained(place, tmp_path)
    expected = by_id(model.table("item"))
    stream = model.table("item").records()
    first = next(stream)
    stepped = threading.Event()

    def other() -> None:
        step(model, optimizer, batch_of(99))
        stepped.set()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises((hb.TableError, hb.StorageError, RuntimeError)):
        model.assign("item", torch.tensor([1]), torch.zeros(1, 48))
    assert not stepped.wait(0.1)
    with torch.no_grad():
        model.eval()(batch_of(5))  # reading goes on
    rest = [first, *stream]
    ids = torch.cat([chunk.ids for chunk in rest]).tolist()
    values = torch.cat([chunk.weights for chunk in rest])
    assert sorted(ids) == sorted(expected)
    for row, value in zip(ids, values, strict=True):
        assert torch.equal(value, expected[row][0])
    thread.join()
    assert stepped.is_set()


@pytest.mark.parametrize("place", [p for p in PLACES if p not in ("memory", "budget")])
def test_look_ahead_moves_nothing_meanwhile(tmp_path: Path, place: str) -> None:
    data = [batch_of(number) for number in range(30)]
    model, optimizer = trained(place, tmp_path, steps=0)
    expected, its_optimizer = trained(place, tmp_path / "other", steps=0)
    for number, batch in enumerate(hb.lookahead(data, model)):
        step(model, optimizer, batch)
        step(expected, its_optimizer, batch)
        if number % 7 == 3:
            stream = model.table("user").records()
            found = [next(stream)]
            found += stream
            ids = torch.cat([chunk.ids for chunk in found])
            assert sorted(ids.tolist()) == expected.rows("user").ids.tolist()
            values = torch.cat([chunk.weights for chunk in found])
            assert torch.equal(values, expected.lookup("user", ids))
    for name in model.tables:
        assert all(map(torch.equal, model.rows(name), expected.rows(name)))


def test_look_ahead_gives_batches_while_rows_are_read(tmp_path: Path) -> None:
    model, optimizer = trained("three", tmp_path, steps=0)
    loader = iter(hb.lookahead([batch_of(number) for number in range(12)], model))
    for _ in range(4):
        step(model, optimizer, next(loader))
    stream = model.table("user").records()
    count = len(next(stream).ids)
    batch = next(loader)  # for which nothing could be brought up
    with pytest.raises((hb.TableError, hb.StorageError, RuntimeError)):
        model(batch)
    count += sum(len(chunk.ids) for chunk in stream)
    assert count == model.count("user")
    for later in (batch, *loader):
        step(model, optimizer, later)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("place", ["memory", "host"])
def test_a_forked_child_is_not_kept_by_who_reads_in_its_parent(tmp_path: Path, place: str) -> None:
    model, optimizer = trained(place, tmp_path)
    stream = model.table("user").records()
    count = len(next(stream).ids)
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # OpenMP's threads do not live on in a fork
            model.assign("user", torch.tensor([1]), torch.full((1, 40), 7.0))
            os._exit(int(model.lookup("user", [1])[0, 0]))
        finally:
            os._exit(1)  # as whoever raises
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert count + sum(len(chunk.ids) for chunk in stream) == model.count("user")
    step(model, optimizer, batch_of(1))


@given(st.lists(st.tuples(st.integers(-40, 40), st.floats(-2, 2, width=16)), max_size=30))
def test_of_ids_that_come_twice_the_last_is_written(rows: list[tuple[int, float]]) -> None:
    ids = torch.tensor([row for row, _ in rows], dtype=torch.int64)
    values = torch.tensor([value for _, value in rows]).half()[:, None]
    for storage in (None, hb.Storage(device=130_000, host="1MB")):
        model = hb.EmbeddingCollection(
            [hb.Table("a", 1, dtype=torch.float16, init=hb.init.Ones())], storage=storage
        )
        rule = hb.optim.RowwiseAdagrad(model.parameters(), lr=0.1)
        table = model.table("a")
        table.allocate()
        states = [torch.arange(len(ids)).float()[:, None]]
        table.place.write(Records(ids, values, states))
        found = by_id(table)
        assert found.keys() == dict(rows).keys()
        for row, _ in rows:
            last = max(k for k, (other, _) in enumerate(rows) if other == row)
            assert float(found[row][0]) == rows[last][1] and float(found[row][1]) == last
        del rule
