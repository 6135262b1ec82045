"""The same rows become the same batches, whatever files they lie in; a plain reader is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data.column_rows import SCHEMA, Row, as_lists, naive, write_csv, write_parquet
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb

# What every format can hold: no lone surrogates, no separator in an element.
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="|"), min_size=1, max_size=6
)
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
MISSING = st.none()
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "clicked": st.sampled_from([0, 1]),
            "price": MISSING | st.floats(-1e6, 1e6, width=32),
            "age": MISSING | st.integers(0, 200),
            "user": MISSING | TEXT,
            "shop": MISSING | INTEGERS,
            "city": MISSING | st.integers(-5, 5),
            "tags": MISSING | st.lists(TEXT, max_size=4),
            "seen": MISSING | st.lists(st.integers(0, 9), max_size=6),
            "item": MISSING | st.integers(0, 9),
            "key": MISSING | TEXT,
        }
    ),
    min_size=1,
    max_size=20,
)
TEXTS = st.sampled_from(
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.binary(),
    ]
)
WIDTHS = st.sampled_from([pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64()])
LISTS = st.sampled_from([pa.list_, pa.large_list])


@st.composite
def types(draw: Any) -> dict[str, pa.DataType]:
    signed = WIDTHS.filter(lambda kind: not str(kind).startswith("u"))
    return {
        "clicked": draw(st.sampled_from([pa.bool_(), pa.int8(), pa.float32(), pa.float64()])),
        "price": draw(st.sampled_from([pa.float32(), pa.float64()])),
        "age": draw(st.sampled_from([pa.uint8(), pa.int64(), pa.float32()])),
        "user": draw(TEXTS),
        "shop": pa.int64(),
        "city": draw(signed),
        "tags": draw(LISTS)(pa.string()),
        "seen": draw(LISTS)(draw(WIDTHS)),
        "item": draw(WIDTHS),
        "key": draw(st.sampled_from([pa.string(), pa.large_string()])),
    }


def same(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    dense = found.pop("dense"), expected.pop("dense")
    for one, other in zip(*dense, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert found == expected


@settings(max_examples=examples(60))
@given(rows=ROWS, kinds=types(), batch_size=st.integers(1, 9), cut=st.integers(0, 20))
def test_csv_and_parquet_are_read_as_the_plain_reader_does(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    kinds: dict[str, pa.DataType],
    batch_size: int,
    cut: int,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    names = list(kinds)
    parts: dict[str, list[Path]] = {"csv": [], "mixed": []}
    for number, part in enumerate((rows[:cut], rows[cut:])):
        parts["csv"].append(write_csv(folder / f"{number}.csv.gz", part, names[::-1], "\t"))
        parquet = write_parquet(folder / f"{number}.parquet", part, kinds, 3)
        parts["mixed"].append(parts["csv"][0] if number == 0 else parquet)
    parts["parquet"] = [write_parquet(folder / "all.parquet", rows, kinds)]
    prints = set()
    for paths in parts.values():
        files = hb.data.open(paths, SCHEMA, batch_size)
        batches = list(files)
        assert len(batches) == len(files) and files.count_rows() == len(rows)
        same(as_lists(batches), naive(rows))
        prints.add(files.fingerprint())
    assert len(prints) == 1


def test_integers_text_and_floats_of_integers(tmp_path: Path) -> None:
    """Text and integers have one id; floats are exact as integers, and refused as text."""
    hashed, exact = (hb.data.Schema({"a": hb.data.Id(values=v)}) for v in ("hash", "int"))
    rows: list[Row] = [{"a": 12}, {"a": None}, {"a": -(2**52)}]
    kinds = {"text": pa.string(), "integers": pa.int64(), "floats": pa.float64()}
    for name, kind in kinds.items():
        values = [{"a": written(row["a"])} for row in rows] if name == "text" else rows
        path = write_parquet(tmp_path / f"{name}.parquet", values, {"a": kind})
        (batch,) = hb.data.open(path, exact)
        assert batch["a"].tolist() == [12, -1, -(2**52)]
        if name == "floats":
            with pytest.raises(hb.data.DataError, match="'a': has the type double.*values=\"int\""):
                list(hb.data.open(path, hashed))
        else:
            (batch,) = hb.data.open(path, hashed)
            twelve, other = hb.data.hash_ids(["12", str(-(2**52))]).tolist()
            assert batch["a"].tolist() == [twelve, -1, other]
    csv = tmp_path / "pandas.csv"
    csv.write_text("a,b\n12.0,1\n,1\nNA,1\n +7. ,1\n")
    (batch,) = hb.data.open(csv, exact)
    assert batch["a"].tolist() == [12, -1, -1, 7]


def written(value: object) -> str | None:
    return None if value is None else str(value)


def test_dictionaries_views_slices_and_nulls_are_hashed_alike() -> None:
    from hotbed.data.arrow_values import hashed

    texts = ["", "a", None, "é" * 20, "a", "x\0y", None, "b"]
    expected = [-1 if not t else int(hb.data.hash_ids(t)) for t in texts]
    plain = pa.array(texts)
    codes = pa.array([1, None, 0, 1], pa.int8())
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
        for begin in range(len(texts)):
            assert hashed(plain.cast(kind).slice(begin)).tolist() == expected[begin:]
    assert hashed(plain.dictionary_encode().slice(1)).tolist() == expected[1:]
    with_null = pa.DictionaryArray.from_arrays(codes, pa.array(["q", None]))
    assert hashed(with_null).tolist() == [-1, -1, int(hb.data.hash_ids("q")), -1]
    assert hashed(pa.nulls(3)).tolist() == [-1] * 3
    fixed = pa.array([b"ab", None, b"cd"], pa.binary(2))
    assert hashed(fixed.slice(1)).tolist() == [-1, int(hb.data.hash_ids("cd"))]


def test_bags_of_slices_and_of_nulls() -> None:
    from hotbed.data.arrow_values import bags_of

    lists = [[1, 2], None, [], [3, None], [4]]
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int32())):
        values, offsets = bags_of(pa.array(lists, kind).slice(1, 3), "|")
        assert (values.to_pylist(), offsets.tolist()) == ([3, None], [0, 0, 0, 2])
    values, offsets = bags_of(pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int64(), 2)), "|")
    assert (values.to_pylist(), offsets.tolist()) == ([1, 2, 5, 6], [0, 2, 2, 4])
    values, offsets = bags_of(pa.array([7, None, 8]), "|")
    assert (values.to_pylist(), offsets.tolist()) == ([7, 8], [0, 1, 1, 2])
    values, offsets = bags_of(pa.array(["a|b", None, "a||"]), "")
    assert (values.to_pylist(), offsets.tolist()) == (["a|b", "a||"], [0, 1, 1, 2])
