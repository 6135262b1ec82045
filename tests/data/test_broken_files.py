"""Files that a stranger has: empty, damaged, odd. Each is read in full, or refused with where and why."""

from __future__ import annotations

import datetime
import decimal
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.column_rows import as_lists

import hotbed as hb
from hotbed.data import DataError, Id, Ids, Key, Label, Number, Schema, Sequence
from hotbed.data.statistics import statistics_of

INT = Schema({"a": Id(values="int")})
TEXT = Schema({"a": Id()})
NUMBER = Schema({"a": Number()})


def values_of(path: Path, schema: Schema, **options: Any) -> list[Any]:
    (found,) = as_lists(list(hb.data.open(path, schema, 3, **options))).values() or [[]]
    return found


READ: dict[str, tuple[bytes, Schema, list[Any]]] = {
    "header only": (b"a,b\n", INT, []),
    "header without an end": (b"a", INT, []),
    "gzip of a header": (gzip.compress(b"a\n"), INT, []),
    "two gzip members": (gzip.compress(b"a,b\n1,2\n") + gzip.compress(b"3,4\n"), INT, [1, 3]),
    "carriage returns": (b"a,b\r\n1,2\r\n3,4", INT, [1, 3]),
    "blank lines": (b"\na,b\n\n1,2\n\n\n3,4\n\n", INT, [1, 3]),
    "byte order mark": (b"\xef\xbb\xbfa;b\n1;2\n", INT, [1]),
    "floats of integers": (b"a,b\n1.0,\n,\n-2.,\nNA,\n", INT, [1, -1, -2, -1]),
    "nulls of R": (b"a,b\nNA,\n1.5,\nNULL,\n", NUMBER, [[0], [1.5], [0]]),
    "true and false": (b"a,b\ntrue,\nFalse,\n", Schema({"a": Label()}), [1, 0]),
    "quoted line end": (b'a,b\n"x\ny",1\n', Schema({"a": Key()}), ["x\ny"]),
    "a quote as inches": (b'a,b\n5" pipe,1\nx,2\n', Schema({"a": Key()}), ['5" pipe', "x"]),
    "zero bytes": (b"a,b\nx\0y,1\n", TEXT, hb.data.hash_ids(["x\0y"]).tolist()),
    "no UTF-8": (b"a,b\n\xe9,1\n", TEXT, hb.data.hash_ids([b"\xe9"]).tolist()),
    "NA is text": (b"a,b\nNA,1\n", TEXT, hb.data.hash_ids(["NA"]).tolist()),
    "separators side by side": (
        b"a,b\n1||2|,1\n,1\n",
        Schema({"a": Ids(values="int")}),
        [[1, 2], []],
    ),
}


@pytest.mark.parametrize(("data", "schema", "expected"), READ.values(), ids=READ)
def test_odd_text_is_read(tmp_path: Path, data: bytes, schema: Schema, expected: list[Any]) -> None:
    path = tmp_path / "with spaces & ümlauts.csv"
    path.write_bytes(data)
    assert values_of(path, schema) == expected
    assert hb.data.open(path, schema).count_rows() == len(expected)
    statistics_of(path)


REFUSED: dict[str, tuple[bytes, Schema, str]] = {
    "nothing": (b"", INT, "is empty: there is no header"),
    "gzip of nothing": (gzip.compress(b""), INT, "is empty: there is no header"),
    "blank": (b"\n\n", INT, "is empty: there is no header"),
    "too few": (
        b"a,b\n1,2\n1\n3,4\n",
        INT,
        r"row 2: 2 values expected, a column each, got 1: '1'\. M",
    ),
    "too many": (b"a,b\n1,2,3\n", INT, "row 1: 2 values expected, a column each, got 3"),
    "other names": (
        b"b,c\n1,2\n",
        INT,
        r"no column of the name 'a'; it has 'b', 'c'\. If the first",
    ),
    "a name twice": (b"a,a\n1,2\n", INT, "has 2 columns of the name 'a'"),
    "a word": (b"a,b\n1,2\nx,3\n", NUMBER, "a.csv, row 2, column 'a': 'x' is not a number"),
    "a fraction": (
        b"a,b\n1.5,2\n",
        INT,
        r"row 1, column 'a': '1\.5' is not an integer below 2\*\*63",
    ),
    "a large integer": (
        b"a,b\n9223372036854775808,2\n",
        INT,
        "row 1, column 'a': '9223372036854775808'",
    ),
    "a large float": (
        b"a,b\n1,2\n1e300,2\n",
        NUMBER,
        "row 2, column 'a': 1e.300 is infinite as float32",
    ),
    "infinity": (b"a,b\ninf,2\n", NUMBER, "row 1, column 'a': inf is infinite"),
    "a missing label": (
        b"a,b\n1,2\n,2\n",
        Schema({"a": Label()}),
        "row 2, column 'a': the label is miss",
    ),
    "an id too many": (
        b"a,b\n1,2\n2|9,2\n",
        Schema({"a": Ids(values="int", rows=9)}),
        r"row 2, column 'a': id 9 is outside \[0, 9\)",
    ),
    "a key of no UTF-8": (
        b"a,b\n\xe9,2\n",
        Schema({"a": Key()}),
        "row 1, column 'a': b'.xe9' is not text",
    ),
    "an open quote": (b'b,a\n1,"2\n3,4\n5,6\n', TEXT, "row 1: a quote is never closed"),
    "gzip cut short": (
        gzip.compress(b"a,b\n1,2\n" * 9000)[:-20],
        INT,
        "Truncated compressed stream",
    ),
    "garbage behind gzip": (gzip.compress(b"a\n1\n") + b"xyz", INT, "cannot be read as CSV"),
    "UTF-16": ("a,b\n1,2\n".encode("utf-16"), INT, "neither Parquet nor text"),
    "Parquet cut short": (b"PAR1\x15\x04", INT, "cannot be read as Parquet"),
    "Feather": (b"ARROW1\0\0", INT, "is an Arrow .Feather. file"),
    "Parquet in gzip": (
        gzip.compress(b"PAR1...."),
        INT,
        "is a Parquet file inside gzip. Decompress",
    ),
}


@pytest.mark.parametrize(("data", "schema", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_in_text_is_named(
    tmp_path: Path, data: bytes, schema: Schema, message: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        list(hb.data.open(path, schema))
    assert str(path) in str(caught.value)


def test_rows_before_a_malformed_one_are_read_and_its_number_is_that_of_the_file(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "1.csv", tmp_path / "2.csv"
    first.write_text("a,b\n" + "1,2\n" * 50)
    second.write_text("a,b\n" + "3,4\n" * 1_200_000 + "5\n")
    files = iter(hb.data.open([first, second], INT, 10))
    assert [next(files)["a"].tolist() for _ in range(6)] == [[1] * 10] * 5 + [[3] * 10]
    with pytest.raises(DataError, match="2.csv, row 1200001: 2 values expected"):
        list(files)


def test_damaged_parquet_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": np.arange(100_000)}), path, write_page_checksum=True)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"{path} cannot be read as Parquet"):
        list(hb.data.open(path, INT))
    path.write_bytes(whole[:4000] + bytes([whole[4000] ^ 255]) + whole[4001:])
    with pytest.raises(DataError, match=f"{path} cannot be read as Parquet.*CRC"):
        list(hb.data.open(path, INT))


TYPES: dict[str, tuple[pa.Array, Schema, str]] = {
    "dates": (
        pa.array([datetime.date(2020, 1, 1)]),
        TEXT,
        "has the type date32.*Write the column as",
    ),
    "decimals": (pa.array([decimal.Decimal("1.5")]), INT, "has the type decimal128"),
    "lists": (pa.array([[1]]), TEXT, 'Lists of them are read by the kinds "ids" and "sequence"'),
    "structs": (pa.array([{"x": 1}]), Schema({"a": Ids()}), "bags are lists or text"),
    "lists of lists": (pa.array([[[1]]]), Schema({"a": Sequence()}), "has the type list"),
    "booleans": (pa.array([True]), TEXT, 'has the type bool.*values="int"'),
    "large unsigned integers": (
        pa.array([1, 2**64 - 1], pa.uint64()),
        INT,
        "row 2, column 'a': 1844",
    ),
    "large floats": (pa.array([1.0, 1e300]), INT, r"row 2, column 'a': 1e\+300 is no id"),
    "fractions": (pa.array([1.5]), INT, r"row 1, column 'a': 1\.5 is no id"),
    "keys of lists": (pa.array([[1]]), Schema({"a": Key()}), "a key is text or a number"),
    "text as a number": (pa.array([[1]]), NUMBER, "numbers are needed"),
}


@pytest.mark.parametrize(("array", "schema", "message"), TYPES.values(), ids=TYPES)
def test_types_that_do_not_fit_are_named(
    tmp_path: Path, array: pa.Array, schema: Schema, message: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": array}), path)
    with pytest.raises(DataError, match=message) as caught:
        list(hb.data.open(path, schema))
    assert str(path) in str(caught.value) and "column 'a'" in str(caught.value)
    assert len(statistics_of(path)) == 1


def test_columns_without_values_and_names_with_dots(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    schema = Schema({"a.b": Id(values="int"), "a": Id(), "n": Number(), "s": Sequence(length=2)})
    columns = {"a": pa.nulls(2), "n": pa.nulls(2), "s": pa.nulls(2), "a.b": pa.array([1, 2])}
    pq.write_table(pa.table(columns), path)
    found = as_lists(list(hb.data.open(path, schema)))
    assert found == {"a.b": [1, 2], "a": [-1, -1], "dense": [[0], [0]], "s": [[-1, -1]] * 2}
    pq.write_table(pa.table({name: column[:0] for name, column in columns.items()}), path)
    assert list(hb.data.open(path, schema)) == [] and len(hb.data.open(path, schema)) == 0
    assert [column.rows for column in statistics_of(path)] == [0] * 4


def test_paths_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, error, message in (
        (tmp_path / "none.csv", FileNotFoundError, "none.csv' does not exist"),
        (tmp_path / "empty", DataError, "has no files of data"),
        (tmp_path / "*.zip", DataError, "has no files of data"),
        (tmp_path / "pipe", DataError, "is a device or a pipe"),
        ("a\0b", DataError, "is no path"),
        ([], DataError, "paths is empty"),
        (3, TypeError, "paths must be a path or several"),
    ):
        with pytest.raises(error, match=message):
            hb.data.open(path, INT)
    (tmp_path / "none.parquet").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(DataError, match="does not begin as a Parquet file does"):
        list(hb.data.open(tmp_path / "none.parquet", INT))


def test_columns_of_text_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1|2|3,x\n4,y\n")
    schema = Schema({"a": Ids(values="int")})
    assert values_of(path, schema, columns=["a", "b"]) == [[1, 2, 3], [4]]
    with pytest.raises(DataError, match="row 1: 4 values expected, a column each, got 3"):
        list(hb.data.open(path, schema, columns=["a", "b", "c", "d"]))
    path.write_text("")
    assert list(hb.data.open(path, schema, columns=["a", "b"])) == []


def test_a_header_of_no_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xe9,a\n1,2\n")
    assert values_of(path, INT) == [2]
    with pytest.raises(DataError, match="the name of column .* is not text in UTF-8"):
        statistics_of(path)


def test_without_pyarrow_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install hotbed\[arrow\]"):
        hb.data.open("a.parquet", INT)
