"""Statistics of columns against plain Python, and the kinds that are guessed from them."""

from __future__ import annotations

import collections
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.column_rows import write_csv, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data import Column, Id, Ids, Key, Label, Number, Sequence
from hotbed.data.guesses import guess
from hotbed.data.id_counts import IdCounts
from hotbed.data.statistics import ColumnStatistics, statistics_of

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), max_size=60)


@given(st.lists(IDS, min_size=1, max_size=5))
def test_counts_of_ids_are_exact_up_to_a_bound(pieces: list[list[int]]) -> None:
    counts, seen = IdCounts(), collections.Counter[int]()
    for piece in pieces:
        counts.add(np.array(piece, np.int64))
        seen.update(piece)
    assert (counts.total, counts.distinct(), counts.is_exact) == (seen.total(), len(seen), True)
    skew = counts.skew()
    if not seen:
        assert (skew.first, skew.curve) == (0.0, ())
        return
    most = [count / seen.total() for _, count in seen.most_common()]
    assert skew.first == pytest.approx(most[0]) and skew.hundredth == pytest.approx(most[0])
    shares, uses = zip(*skew.curve, strict=True)
    assert shares[-1] == pytest.approx(1) and uses[-1] == pytest.approx(1)
    assert list(uses) == sorted(uses) and (len(most) == 1 or uses[0] == pytest.approx(most[0]))


def test_beyond_the_bound_they_are_estimates() -> None:
    """The standard error is about sqrt(1 / kept) = 2 %; the frequent ids are counted on."""
    rng = np.random.default_rng(0)
    counts, seen = IdCounts(1 << 12), collections.Counter[int]()
    for _ in range(40):
        ids = np.concatenate([rng.integers(0, 2**40, 3000), rng.integers(0, 5, 1000)])
        counts.add(ids)
        seen.update(ids.tolist())
    assert not counts.is_exact and counts.total == 160_000
    assert counts.distinct() == pytest.approx(len(seen), rel=0.1)
    skew = counts.skew()
    assert skew.first == pytest.approx(seen.most_common(1)[0][1] / seen.total())
    hundredth = sum(count for _, count in seen.most_common(len(seen) // 100))
    assert skew.hundredth == pytest.approx(hundredth / seen.total(), abs=0.02)


VALUES: dict[str, list[Any]] = {
    "clicked": [0, 1, 1, 0] * 50,
    "price": [None, *(math.exp(i / 15) for i in range(199))],
    "height": [170.0 + i % 7 for i in range(199)] + [math.nan],
    "user_id": [i % 60 for i in range(200)],
    "userGroup": [f"group {i % 3}" for i in range(200)],
    "genres": ["a|b", "c", None, "b|a|d"] * 50,
    "history": [[1, 2, i] for i in range(198)] + [[], None],
    "row": [f"r{i}" for i in range(200)],
    "empty": [None] * 200,
    "constant": [7] * 200,
}
TYPES = {
    "clicked": pa.int8(),
    "price": pa.float64(),
    "height": pa.float32(),
    "user_id": pa.uint32(),
    "userGroup": pa.dictionary(pa.int8(), pa.string()),
    "genres": pa.string(),
    "history": pa.list_(pa.int64()),
    "row": pa.string(),
    "empty": pa.string(),
    "constant": pa.int64(),
}


def rows() -> list[dict[str, Any]]:
    names = list(VALUES)
    return [dict(zip(names, row, strict=True)) for row in zip(*VALUES.values(), strict=True)]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "a.parquet", rows(), TYPES, group=64)


def test_numbers_are_those_of_plain_python(parquet: Path, tmp_path: Path) -> None:
    written = [{**row, "height": None} if row["height"] != row["height"] else row for row in rows()]
    text = write_csv(tmp_path / "a.csv", written, list(VALUES))
    for path in (parquet, text):
        found = {column.name: column for column in statistics_of(path)}
        assert list(found) == list(VALUES)
        for name in ("clicked", "price", "height", "user_id", "constant"):
            numbers = [v for v in VALUES[name] if v is not None and v == v]
            column = found[name]
            assert (column.low, column.high) == (min(numbers), max(numbers))
            assert column.mean == pytest.approx(statistics.fmean(numbers))
            assert column.std == pytest.approx(statistics.pstdev(numbers))
            assert (column.rows, column.missing) == (200, 200 - len(numbers))
            assert (column.distinct, column.is_exact) == (len(set(numbers)), True)
        assert found["price"].is_numeric and not found["price"].is_integral
        genres, history = found["genres"], found["history"]
        assert (genres.distinct, genres.missing, genres.longest) == (4, 50, 3)
        assert (history.distinct, history.missing, history.longest) == (198, 2, 3)
        assert genres.skew.first == pytest.approx(100 / 300)
        assert (found["empty"].missing, found["row"].distinct) == (200, 200)


KINDS: dict[str, Column | None] = {
    "clicked": Label(),
    "price": Number("log"),
    "user_id": Id(values="int"),
    "userGroup": Id(),
    "genres": Ids(),
    "history": Sequence(3, values="int"),
    "row": Key(),
    "empty": None,
    "constant": None,
}


def test_kinds_are_guessed(parquet: Path) -> None:
    found = {column.name: column for column in statistics_of(parquet)}
    guessed = {name: guess(column).kind for name, column in found.items()}
    height = guessed.pop("height")
    assert guessed == KINDS
    assert isinstance(height, Number) and height.transform == "standard"
    assert height.mean == pytest.approx(found["height"].mean, rel=1e-5)
    assert guess(found["clicked"], label_found=True).kind == Number()


def test_a_sample_ends_where_it_should(parquet: Path, tmp_path: Path) -> None:
    seen = []
    found = statistics_of(
        [parquet, parquet], 230, names=["row"], progress=lambda *a: seen.append(a)
    )
    assert [(column.name, column.rows, column.distinct) for column in found] == [("row", 230, 200)]
    assert seen[-1] == (230, 230)
    dates = pa.table({"day": pa.array([1, 2], pa.date32())})
    pq.write_table(dates, tmp_path / "dates.parquet")
    (column,) = statistics_of(tmp_path / "dates.parquet")
    assert isinstance(column, ColumnStatistics) and column.is_unreadable
    assert guess(column) == (None, "date32[day] is not read")
