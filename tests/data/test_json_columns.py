"""Columns as JSON has them become what the same columns of files become, bit for bit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.data.records import CriteoColumns, RecordError, SchemaColumns

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCHEMA = hb.data.Schema(
    {
        "clicked": hb.data.Label(),
        "price": hb.data.Number(transform="log"),
        "age": hb.data.Number(transform="standard", mean=30.0, std=7.0, missing=0.5),
        "user": hb.data.Id(),
        "shop": hb.data.Id(rows=100),
        "city": hb.data.Id(values="int"),
        "tags": hb.data.Ids(),
        "words": hb.data.Ids(separator="", table="tags"),
        "seen": hb.data.Sequence(length=3, table="city", values="int"),
        "both": hb.data.Pair(of=("user", "city")),
        "visit": hb.data.Key(),
    }
)
ENTRIES = ["dense", "user", "shop", "city", "tags", "words", "seen", "both"]
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="|"), min_size=1)
WHOLE = st.integers(-(2**63), 2**63 - 1)


def maybe(values: Any) -> Any:
    return st.none() | values


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "price": maybe(st.floats(-1e30, 1e30)),
            "age": maybe(st.integers(-(2**60), 2**60)),
            "user": maybe(TEXT),
            "shop": maybe(WHOLE),
            "city": maybe(WHOLE),
            "tags": maybe(st.lists(maybe(TEXT), max_size=4)),
            "words": maybe(TEXT),
            "seen": maybe(st.lists(maybe(WHOLE), max_size=6)),
        }
    ),
    min_size=1,
    max_size=8,
)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ENTRIES:
        one, other = found[name], wanted[name]
        if isinstance(other, hb.Jagged):
            assert torch.equal(one.offsets, other.offsets), name
            one, other = one.values, other.values
        assert one.dtype == other.dtype and one.shape == other.shape, name
        assert one.numpy().tobytes() == other.numpy().tobytes(), name


def encoded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = SchemaColumns(SCHEMA, ENTRIES)
    return columns.batch({name: [row[name] for row in rows] for name in columns.needed}, len(rows))


@settings(deadline=None)
@given(ROWS)
def test_as_parquet_and_csv(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("files")
    types = {
        "price": pa.float64(),
        "age": pa.int64(),
        "user": pa.string(),
        "shop": pa.int64(),
        "city": pa.int64(),
        "tags": pa.list_(pa.string()),
        "words": pa.string(),
        "seen": pa.list_(pa.int64()),
        "clicked": pa.int64(),
        "visit": pa.string(),
    }
    there = [{**row, "clicked": 1, "visit": "v"} for row in rows]
    table = pa.table({n: pa.array([r[n] for r in there], t) for n, t in types.items()})
    pq.write_table(table, folder / "rows.parquet")
    (batch,) = hb.data.open(folder / "rows.parquet", SCHEMA, batch_size=100)
    found = encoded(rows)
    same(found, batch)
    as_text = [{name: text_of(value) for name, value in row.items()} for row in there]
    with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*types], quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(as_text)
    (batch,) = hb.data.open(folder / "rows.csv", SCHEMA, batch_size=100)
    same(found, batch)
    same(encoded(as_text), batch)  # the text of a line is a value, too


def text_of(value: Any) -> str:
    if isinstance(value, list):
        return "|".join(map(text_of, value))
    return "" if value is None else str(value)


def row(**changes: Any) -> dict[str, Any]:
    plain = {"price": 1, "age": 2, "user": "a", "shop": 3, "city": 4, "tags": [], "words": "w"}
    return {**plain, "seen": [1], **changes}


def test_the_same_value_in_other_types_has_the_same_id() -> None:
    """An id does not depend on what else is in a request."""
    plain = encoded([row(user="12", city=7, tags=["x", "12"], price=2)])
    for other in (
        [row(user=12, city="7", tags="x|12", price=2.0)],
        [row(user="12", city=7.0, tags=["x", 12], price="2"), row(city=None, price="NA")],
        [row(user=12, city="7.0", tags=["x", 12]), row(user="b", city=1, tags="c")],
        [row(user=12), row(user=2**64 - 1, city=None), row(user=-(2**63), city=0.0)],
    ):
        found = encoded(other)
        assert found["user"][0] == plain["user"][0]
    assert encoded([row(tags="x|12"), row(tags=["y", 3])])["tags"][0].tolist() == (
        plain["tags"][0].tolist()
    )
    assert encoded([row(city="7.0"), row(city=1)])["city"].tolist() == [7, 1]
    assert encoded([row(city=7.0), row(city=1)])["city"].tolist() == [7, 1]
    assert encoded([row(user=2**64 - 1), row(user=-5)])["user"].tolist() == (
        hb.data.hash_ids([str(2**64 - 1), "-5"]).tolist()
    )


@pytest.mark.parametrize(
    ("changes", "column", "at", "told"),
    [
        ({"user": 1.5}, "user", None, "ids are text or integers"),
        ({"user": True}, "user", 1, "a boolean stands among other values"),
        ({"user": ["a"]}, "user", 1, "is neither text nor a number nor null"),
        ({"user": {}}, "user", 1, "is neither text nor a number nor null"),
        ({"city": 1.5}, "city", 1, "1.5 is no id"),
        ({"city": 2.0**53}, "city", 1, "is no id"),
        ({"city": "x"}, "city", 1, "'x' is not an integer below 2**63"),
        ({"city": 2**63}, "city", 1, "is not an integer below 2**63"),
        ({"price": "x"}, "price", 1, "'x' is not a number"),
        ({"age": 1e300}, "age", 1, "is infinite as float32"),
        ({"tags": [["a"]]}, "tags", 1, "is neither text nor a number nor null"),
        ({"tags": ["a", 1.5]}, "tags", 1, "1.5 stands among text"),
        ({"seen": ["a"]}, "seen", 1, "'a' is not an integer"),
    ],
)
def test_what_a_column_cannot_have(
    changes: dict[str, Any], column: str, at: int | None, told: str
) -> None:
    first = row(tags=["b"], user="7" if "user" in changes else "a")
    if changes == {"user": 1.5}:
        first = row(user=7)
    with pytest.raises(RecordError) as error:
        encoded([first, row(**changes)])
    assert error.value.column == column and told in error.value.text
    assert error.value.row == at


def test_columns_that_are_asked_with() -> None:
    columns = SchemaColumns(SCHEMA, ["both", "tags"])
    assert {*columns.needed} == {"user", "city", "tags"}
    assert {*columns.optional} == {"clicked", "price", "age", "shop", "words", "seen", "visit"}
    assert {*columns.batch({"user": ["a"], "city": [3], "tags": [None]}, 1)} == {"both", "tags"}
    with pytest.raises(KeyError, match="nothing"):
        SchemaColumns(SCHEMA, ["nothing"])
    with pytest.raises(KeyError, match="nothing"):
        CriteoColumns(["nothing"])


NUMBER = st.integers(-(10**18) + 1, 10**18 - 1)
CATEGORY = st.integers(0, 2**32 - 1).map("{:08x}".format)
LINES = st.lists(st.tuples(*[maybe(NUMBER)] * 13, *[maybe(CATEGORY)] * 26), min_size=1, max_size=4)


@settings(deadline=None)
@given(LINES)
def test_as_a_click_log(tmp_path_factory: pytest.TempPathFactory, lines: list[Any]) -> None:
    path: Path = tmp_path_factory.mktemp("log") / "log.tsv"
    text = ["\t".join("" if each is None else str(each) for each in line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    (batch,) = hb.data.CriteoLog(path, labels=False)
    names = [*hb.data.DENSE, *hb.data.CATEGORIES]
    for entries in (["dense", *hb.data.CATEGORIES], ["C3", "C1"], ["dense"]):
        columns = CriteoColumns(entries)
        values = {name: [line[names.index(name)] for line in lines] for name in columns.needed}
        found = columns.batch(values, len(lines))
        assert [*found] == entries
        for name, entry in found.items():
            assert entry.numpy().tobytes() == batch[name].numpy().tobytes()


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("C2", "68fd1e6", "'68fd1e6' is not 8 hexadecimal digits"),
        ("C2", 1, "1 is not 8 hexadecimal digits"),
        ("C2", "68fd1e64\t", "is no value of a click log"),
        ("C2", "68fd1e64\n", "is no value of a click log"),
        ("C2", "0" * 10**6, "is no value of a click log"),
        ("C2", ["68fd1e64"], "is no value of a click log"),
        ("I3", 1.5, "is no value of a click log"),
        ("I3", True, "is no value of a click log"),
        ("I3", "x", "'x' is not an integer"),
        ("I3", 10**18, "is not an integer of at most 18 digits"),
    ],
)
def test_what_a_click_log_cannot_have(column: str, value: Any, told: str) -> None:
    columns = CriteoColumns(["dense", *hb.data.CATEGORIES])
    values: dict[str, list[Any]] = {name: [None, None] for name in columns.needed}
    values[column][1] = value
    with pytest.raises(RecordError) as error:
        columns.batch(values, 2)
    assert error.value.column == column and told in error.value.text and error.value.row == 1
    values["I3"][1], values[column][1] = 5.0, None if column == "I3" else "68FD1E64"
    columns.batch(values, 2)
