"""`hotbed.data.Schema`: what it says of its columns, its files, and its errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.data import Id, Ids, Key, Label, Number, Pair, Schema, SchemaError, Sequence
from hotbed.data.blocks import Builder
from hotbed.data.columns import KINDS, Column, Source
from hotbed.errors import InputError

BY_HAND = """
[columns]
clicked = "label"
price = { kind = "number", transform = "log" }
user = "id"
genres = { kind = "ids", separator = "," , pooling = "sum" }
history = { kind = "sequence", table = "item", length = 20 }
item = "id"
"both of them" = { kind = "pair", of = ["user", "item"], rows = 1000 }
"naïve\\u007f" = "key"
"""


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(BY_HAND, encoding="utf-8")
    schema = Schema.read(path)
    assert dict(schema.columns) == {
        "clicked": Label(),
        "price": Number("log"),
        "user": Id(),
        "genres": Ids(",", "sum"),
        "history": Sequence(20, table="item"),
        "item": Id(),
        "both of them": Pair(of=("user", "item"), rows=1000),
        "naïve\x7f": Key(),
    }
    assert (schema.labels, schema.numbers) == (("clicked",), ("price",))
    assert list(schema.features.values()) == ["user", "genres", "item", "item", "both of them"]
    tables = {table.name: table for table in schema.tables(8, hb.init.Zeros())}
    assert [t.combiner for t in tables.values()] == ["sum", "sum", "none", "sum"]
    assert tables["item"].padding_idx == -1 and tables["user"].padding_idx is None
    assert tables["both of them"].rows == 1001 and tables["user"].rows is None
    assert {table.dim for table in tables.values()} == {8}


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ROWS = st.none() | st.integers(1, 10**9)
NUMBERS = st.floats(-1e30, 1e30)
VALUES = st.sampled_from(["hash", "int"])
COLUMNS = st.one_of(
    st.just(Label()),
    st.builds(Number, st.sampled_from(["none", "log"]), missing=NUMBERS),
    st.builds(Number, st.just("standard"), mean=NUMBERS, std=st.floats(1e-9, 1e9)),
    st.builds(Id, rows=ROWS, values=VALUES),
    st.builds(Ids, st.text(max_size=2), st.sampled_from(["mean", "max"]), rows=ROWS, values=VALUES),
    st.builds(Sequence, st.integers(1, 99), rows=ROWS, values=VALUES),
    st.builds(Key, VALUES.map(lambda v: {"hash": "text"}.get(v, v))),
)


@given(st.dictionaries(NAMES.filter(lambda n: n not in ("label", "dense")), COLUMNS, min_size=1))
def test_files_and_json_give_the_schema_back(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, Column]
) -> None:
    schema = Schema(columns)
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    schema.write(path)
    assert Schema.read(path) == schema and list(Schema.read(path).columns) == list(columns)
    assert Schema.from_json(json.loads(json.dumps(schema.as_json()))) == schema


def test_a_new_kind_is_a_class_and_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Length(Column):
        """Length of text."""

        kind = "length"
        key = "dense"
        times: int = 1

        def add(self, name: str, source: Source, builder: Builder) -> None:
            lengths = [len(text.as_py() or b"") * self.times for text in source.arrays[name]]
            builder.number("dense", np.array(lengths, np.float32))

    monkeypatch.setattr("hotbed.data.schema_files.KINDS", {**KINDS, "length": Length})
    schema = Schema.from_json({"columns": {"a": {"kind": "length", "times": 2}, "b": "number"}})
    (tmp_path / "a.csv").write_text("a,b\nxyz,5\n,6\n")
    (batch,) = hb.data.open(tmp_path / "a.csv", schema)
    assert batch["dense"].tolist() == [[6, 5], [0, 6]]


WRONG: dict[str, tuple[Any, str]] = {
    "a kind": ({"a": "idd"}, r"Column 'a': kind is 'idd'; did you mean 'id'\?"),
    "no kind": ({"a": {"rows": 3}}, "Column 'a': kind is None; it must be one of label, number"),
    "a number": ({"a": 3}, "Column 'a': 3 is no kind; write \"id\""),
    "a key": ({"a": {"kind": "id", "row": 3}}, r"'row' of kind 'id'; did you mean 'rows'\?"),
    "a key of a label": (
        {"a": {"kind": "label", "x": 3}},
        "unknown key 'x' of kind 'label'; it has",
    ),
    "rows": ({"a": {"kind": "id", "rows": "3"}}, "Column 'a': rows is '3'; it must be an integer"),
    "no rows": ({"a": {"kind": "id", "rows": 0}}, "rows is 0; it must be an integer, at least 1"),
    "values": ({"a": {"kind": "id", "values": "Hash"}}, r"values is 'Hash'; did you mean 'hash'\?"),
    "separator": ({"a": {"kind": "ids", "separator": 1}}, "separator is 1; it must be a string"),
    "pooling": (
        {"a": {"kind": "ids", "pooling": "avg"}},
        "pooling is 'avg'; it must be one of none",
    ),
    "table": ({"a": {"kind": "id", "table": ""}}, "table is ''; it must be a string that is not"),
    "length": (
        {"a": {"kind": "sequence", "length": None}},
        "length is None; it must be an integer",
    ),
    "mean": (
        {"a": {"kind": "number", "transform": "standard"}},
        "mean is None; it must be a finite",
    ),
    "std": ({"a": {"kind": "number", "mean": 1, "std": 0}}, "std is 0; it must be .* above 0"),
    "missing": ({"a": {"kind": "number", "missing": True}}, "missing is True; it must be a finite"),
    "no pair": ({"a": "pair"}, "Column 'a': kind 'pair' needs the key of"),
    "pair of one": ({"a": {"kind": "pair", "of": ["a"]}}, r"of is \['a'\]; it must be a list of 2"),
    "pair of none": (
        {"a": {"kind": "pair", "of": ["b", "c"]}, "b": "id", "c": "ids"},
        "Column 'a' is a pair of 'c', which must be a column of the kind 'id'",
    ),
    "label": (
        {"label": "id"},
        r"Column 'label' of the kind 'id' would take the place of batch\['la",
    ),
    "other rows": (
        {"a": {"kind": "id", "rows": 5}, "b": {"kind": "id", "table": "a"}},
        "Table 'a' is shared by 'a' and 'b', whose rows differ: 5 and None",
    ),
    "other pooling": (
        {"a": "ids", "b": {"kind": "sequence", "table": "a"}},
        "Table 'a' is shared by 'a' and 'b', whose pooling differ: mean and none",
    ),
    "other hashes": (
        {"a": {"kind": "id", "values": "int"}, "b": {"kind": "id", "table": "a"}},
        "whose hashed ids differ: False and True",
    ),
    "nothing": ({}, r"A schema has a section \[columns\]"),
    "no name": ({"": "id"}, "A column's name must be a string that is not empty, not ''"),
}


@pytest.mark.parametrize(("columns", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(columns: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.from_json({"columns": columns})


def test_wrong_files_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    for text, message in (
        ("x", "schema.toml: not TOML"),
        ('[columns]\na = "id"\n[tables]', r"schema.toml: Unknown key 'tables'"),
        ('[columns]\na = "idd"', "schema.toml: Column 'a': kind"),
    ):
        path.write_text(text)
        with pytest.raises(SchemaError, match=message):
            Schema.read(path)
    with pytest.raises(SchemaError, match="none.toml: No such file"):
        Schema.read(tmp_path / "none.toml")
    with pytest.raises(SchemaError, match="Column 'a' must be a kind such as"):
        Schema({"a": "id"})
    with pytest.raises(SchemaError, match="A schema needs columns"):
        Schema([])
    with pytest.raises(SchemaError, match="schema is 'x'; give a hotbed.data.Schema"):
        hb.data.open(path, "x")
    schema = Schema({"a": Id()})
    with pytest.raises(InputError, match="labels is 3"):
        hb.data.open(path, schema, labels=3)
    for columns in ("abc", [], [1]):
        with pytest.raises(SchemaError, match="columns is"):
            hb.data.open(path, schema, columns=columns)


def test_a_static_table_has_a_row_for_what_is_missing(tmp_path: Path) -> None:
    schema = Schema(
        {
            "seen": Sequence(3, table="item", rows=10, values="int"),
            "item": Id(values="int", rows=10),
            "city": Id(rows=7),
        }
    )
    (tmp_path / "a.csv").write_text("seen,item,city\n1|2,4.0,Oslo\n,,\n")
    (batch,) = hb.data.open(tmp_path / "a.csv", schema)
    assert batch["seen"].tolist() == [[1, 2, 10], [10, 10, 10]] and batch["item"].tolist() == [
        4,
        10,
    ]
    assert batch["city"].tolist() == [int(hb.data.hash_ids("Oslo")) % 7, 7]
    model = hb.EmbeddingCollection(schema.tables(4), features=schema.features)
    vectors = model(batch)
    assert vectors["seen"].shape == (2, 3, 4) and torch.equal(vectors["seen"][1], torch.zeros(3, 4))
    assert torch.equal(vectors["item"][1], torch.zeros(4))
