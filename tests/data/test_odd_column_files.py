"""Files of columns that are odd, and what is shown of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotbed as hb
from hotbed.data import Id, Label, Schema
from hotbed.data.guesses import guess, schema_of
from hotbed.data.statistics import ColumnStatistics, statistics_of
from hotbed.errors import HotbedError

_CLICKS = Schema({"y": Label(), "u": Id()})


def _guessed(statistics: list[ColumnStatistics]) -> dict[str, str]:
    guesses = {column.name: guess(column) for column in statistics}
    return {
        n: found.reason if found.kind is None else found.kind.kind for n, found in guesses.items()
    }


def _parquet(path: Path, columns: dict[str, object]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("text", ["y,u", "y,u\n", "\ufeffy,u\r\n", '"y","u"'])
def test_a_header_alone_has_no_rows(tmp_path: Path, text: str) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text(text, newline="")
    files = hb.data.open(path, _CLICKS)
    assert (list(files), len(files)) == ([], 0)
    assert [column.rows for column in statistics_of(path)] == [0, 0]


def test_quoted_names_do_not_tell_the_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text('y,"u\t\t\t;;;"\n1,a\n')
    (batch,) = hb.data.open(path, Schema({"y": Label(), "u\t\t\t;;;": Id()}))
    assert batch["u\t\t\t;;;"].tolist() == hb.data.hash_ids(["a"]).tolist()


def test_ranges_with_steps_are_refused_as_other_input(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("y,u\n1,a\n")
    with pytest.raises(HotbedError, match="step 2"):
        hb.data.open(path, _CLICKS, rows=slice(0, 10, 2))


def test_columns_that_are_not_read_are_left_out_of_statistics(tmp_path: Path) -> None:
    path = _parquet(
        tmp_path / "odd.parquet",
        {
            "struct": pa.array([{"a": 1}, {"a": 2}]),
            "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
            "fractions": [[0.5], [1.0, 2.0]],
            "large": [1e308, -1e308],
            "city": ["a", "b"],
        },
    )
    found = _guessed(statistics_of(path))
    assert found["city"] == "id"
    assert "not read" in found["struct"] and "not read" in found["map"]
    assert found["fractions"] == "lists of fractions"
    assert found["large"] == "number"  # by its logarithm


def test_a_schema_is_guessed_where_names_are_none_or_taken(tmp_path: Path) -> None:
    path = tmp_path / "of_pandas.csv"  # DataFrame.to_csv writes an index without a name
    path.write_text(",dense,label,city\n" + "0,a,x,k\n1,b,y,l\n" * 3)
    found = {column.name: guess(column) for column in statistics_of(path)}
    assert found[""].reason == "it has no name"
    assert found["dense"].reason == "rename it, 'dense' is taken"
    assert list(schema_of(found.items()).columns) == ["city"]


def test_statistics_take_any_number_of_rows(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "few.parquet", {"a": [1, 2, 3]})
    assert [column.rows for column in statistics_of(path, 10**20)] == [3]


def test_a_fraction_is_named_as_it_is_written(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "fractions.parquet", {"u": [1.0, 5.5]})
    with pytest.raises(HotbedError, match=r"row 2, column 'u': 5\.5 is no id"):
        list(hb.data.open(path, Schema({"u": Id(values="int")})))
