"""Vectors of mapped rows against NumPy, one row at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import hotbed as hb
from hotbed import _core
from hotbed.errors import IdError
from hotbed.serve import BundleError
from hotbed.serve.bundles.bundle import LookupEntry, TableEntry
from hotbed.serve.bundles.defaults import first_entry
from hotbed.serve.bundles.reading import (
    BundleTable,
    Ids,
    MappedRows,
    looked_up,
)
from hotbed.serve.bundles.row_formats import ROW_FORMATS
from hotbed.table.live import LiveTable, live_table
from hotbed.tables import DTYPES

ISAS = ("base", "avx2", "avx512")
COMBINERS = ("none", "sum", "mean", "sqrtn", "max")
DIMS = (1, 2, 3, 8, 15, 16, 17, 31, 33, 48, 64, 100, 128, 144, 200)
COUNTS = (0, 1, 5, 63, 64, 65, 127, 129, 700)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if not _core.use_isa(request.param):
        pytest.skip(f"this processor, or build, has no {request.param}")
    yield request.param
    _core.use_isa("best")


class Layer(NamedTuple):
    """Rows as they were written, by id."""

    mapped: MappedRows
    rows: dict[int, NDArray[np.float32]]
    training: LiveTable | None
    """Whose first values ids without row read; None: they read a vector."""


INITS = (
    hb.init.Uniform(-2, 3),
    hb.init.Normal(0, 1),
    hb.init.TruncatedNormal(1, 2),
    hb.init.Ones(),
)


def trained_table(dim: int, draw: np.random.Generator) -> LiveTable:
    """A dynamic table whose columns start as one thing or as two."""
    init: Any = INITS[draw.integers(len(INITS))]
    if dim > 1 and draw.random() < 0.5:
        init = hb.init.Columns([(1, init), (dim - 1, INITS[draw.integers(len(INITS))])])
    dtype = DTYPES[draw.integers(len(DTYPES))]
    padding = int(draw.integers(-5, 5)) if draw.random() < 0.5 else None
    table = hb.Table("t", dim, dtype=dtype, init=init, padding_idx=padding)
    (handle,) = hb.EmbeddingCollection([table], seed=int(draw.integers(100))).parameters()
    live = live_table(handle)
    assert live is not None
    return live


def written(
    folder: Path,
    name: str,
    how: str,
    dim: int,
    ids: NDArray[np.int64] | int,
    draw: np.random.Generator,
    training: LiveTable | None = None,
) -> Layer:
    """Write random rows. `ids`: rising, or of a static table how many."""
    count = ids if isinstance(ids, int) else len(ids)
    about: TableEntry = {
        "files": name,
        "dim": dim,
        "rows": count,
        "static": isinstance(ids, int),
        "stored_as": how,
    }
    form, parts = ROW_FORMATS[how], {}
    weights = draw.standard_normal((count, dim)).astype(np.float32)
    weights[draw.random((count, dim)) < 0.1] = 0.0
    weights[draw.random((count, dim)) < 0.1] = -0.0
    parts["rows"] = np.empty((0, form.columns(dim)), form.dtype)
    parts["scales"] = np.empty((0, 2), form.scale_dtype or np.float32)
    if count:
        stored = form.encoded(torch.from_numpy(weights))
        parts["rows"] = stored.rows.numpy()
        if stored.scales is not None:
            parts["scales"] = stored.scales.numpy()
    if form.scale_dtype is None:
        del parts["scales"]
    parts["default"] = draw.standard_normal(dim).astype(np.float32)
    if training is not None:
        del parts["default"]
        about["first"] = json.loads(json.dumps(first_entry(training)))
    if not isinstance(ids, int):
        parts["ids"] = ids
    for part, numbers in parts.items():
        np.save(folder / f"{name}.{part}.npy", numbers)
    known = range(count) if isinstance(ids, int) else ids.tolist()
    rows = {id_: row_of(parts, how, dim, at) for at, id_ in enumerate(known)}
    return Layer(MappedRows(str(folder), about), rows, training)


def row_of(parts: dict[str, NDArray[Any]], how: str, dim: int, at: int) -> NDArray[np.float32]:
    numbers = parts["rows"][at]
    if how == "int4":
        numbers = np.array([numbers[c // 2] >> (4 * (c % 2)) & 15 for c in range(dim)], np.uint8)
    floats = numbers.astype(np.float32)
    if how in ("int8", "int4"):
        scale, offset = parts["scales"][at].astype(np.float32)
        product = floats * scale
        floats = product + offset
    return floats


def expected_row(layers: list[Layer], id_: int) -> NDArray[np.float32]:
    for layer in reversed(layers):
        if id_ in layer.rows:
            return layer.rows[id_]
    if (training := layers[0].training) is not None:
        return np.asarray(training.lookup([id_]).float()[0])
    return np.asarray(layers[0].mapped.default.vector, np.float32)


def combined(rows: list[NDArray[np.float32]], combiner: str, dim: int) -> NDArray[np.float32]:
    """A bag's vector; rows in their order."""
    if not rows:
        return np.zeros(dim, np.float32)
    if combiner == "max":
        largest = rows[0]
        for row in rows[1:]:
            largest = np.where(row > largest, row, largest)
        return largest
    if combiner == "none":
        return rows[0]
    total = np.zeros(dim, np.float32)
    for row in rows:
        total = total + row
    count = np.float32(len(rows))
    divisors = {"sum": np.float32(1), "mean": count, "sqrtn": np.sqrt(count)}
    return np.asarray(total / divisors[combiner], np.float32)


def lookup_of(combiner: str, padding: int | None, dtype: str = "float32") -> LookupEntry:
    return {
        "input": "i",
        "table": "t",
        "combiner": combiner,
        "padding_idx": padding,
        "vectors": "v",
        "dtype": dtype,
    }


def vectors_of(*asked: Any) -> NDArray[Any]:
    """The vectors of one lookup: its entry, the table, ids and offsets."""
    (found,) = looked_up([Ids.of(*asked)])
    return found


def same_bits(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def layers_of(
    folder: Path, draw: np.random.Generator, static: bool, mixed: bool, first: bool
) -> list[Layer]:
    """One to three layers, the first of a static or a dynamic table."""
    dim, how = int(draw.choice(DIMS)), str(draw.choice([*ROW_FORMATS]))
    count = int(draw.choice(COUNTS))
    room = count if static else 3 * max(COUNTS)
    layers = []
    training = trained_table(dim, draw) if first and not static else None
    for number in range(int(draw.integers(1, 4))):
        if mixed:
            how = str(draw.choice([*ROW_FORMATS]))
        ids: NDArray[np.int64] | int = count
        if number or not static:
            some = min(room, count if number == 0 else int(draw.choice(COUNTS)))
            ids = np.sort(draw.choice(room, some, replace=False)) - (0 if static else 500)
        layers.append(written(folder, str(number), how, dim, ids, draw, training))
    return layers


def asked_of(
    layers: list[Layer], draw: np.random.Generator, padding: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids and offsets of bags, some of which are empty."""
    about = layers[0].mapped.about
    lengths = draw.integers(0, 6, int(draw.choice([0, 1, 40])))
    if draw.random() < 0.3:
        lengths[:] = 1
    most = about["rows"] if about["static"] else 3 * max(COUNTS)
    if most == 0:
        lengths[:] = 0
    ids = draw.integers(0 if about["static"] else -600, max(1, most), int(lengths.sum()))
    if padding is not None:
        ids[draw.random(len(ids)) < 0.3] = padding
    return ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    static=st.booleans(),
    mixed=st.booleans(),
    first=st.booleans(),
    padding=st.sampled_from([None, -1, 0, 3, 10**6, 2**62, -(2**63)]),
)
def test_vectors_have_the_bits_of_numpy(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    static: bool,
    mixed: bool,
    first: bool,
    padding: int | None,
) -> None:
    draw = np.random.default_rng(seed)
    layers = layers_of(tmp_path_factory.mktemp("rows"), draw, static, mixed, first)
    table = BundleTable([layer.mapped for layer in layers])
    dim = table.about["dim"]
    lookups, wanted = [], []
    for combiner in COMBINERS:
        ids, offsets = asked_of(layers, draw, padding)
        rows = [None if id_ == padding else expected_row(layers, id_) for id_ in ids.tolist()]
        bounds = np.arange(len(ids) + 1) if combiner == "none" else offsets
        bags = [
            combined([row for row in rows[a:b] if row is not None], combiner, dim)
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        dtype = str(draw.choice(["float32", "float16"]))
        lookup = lookup_of(combiner, padding, dtype)
        lookups.append(Ids.of(lookup, table, ids, None if combiner == "none" else offsets))
        wanted.append(np.array(bags, np.float32).reshape(len(bags), dim).astype(dtype))
    for isa in filter(_core.use_isa, ISAS):
        for found, vectors in zip(looked_up(lookups), wanted, strict=True):
            same_bits(found, vectors)
        same_bits(looked_up(lookups[1:2])[0], wanted[1])
        assert isa in ISAS
    _core.use_isa("best")


@pytest.mark.parametrize("how", [*ROW_FORMATS])
@pytest.mark.parametrize("static", [True, False])
def test_large_batches_are_shared_among_threads(
    tmp_path: Path, isa: str, how: str, static: bool
) -> None:
    draw = np.random.default_rng(1)
    ids: NDArray[np.int64] | int = 3000
    if not static:
        ids = np.sort(draw.choice(10**12, 3000, replace=False))
    layer = written(tmp_path, "0", how, 40, ids, draw)
    table = BundleTable([layer.mapped])
    known = np.array([*layer.rows])
    lengths = draw.integers(0, 40, 2000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    asked = known[draw.integers(0, 3000, offsets[-1])]
    whole = vectors_of(lookup_of("mean", None), table, asked, offsets)
    for bag in range(0, 2000, 97):
        some = asked[offsets[bag] : offsets[bag + 1]].tolist()
        same_bits(whole[bag], combined([layer.rows[id_] for id_ in some], "mean", 40))
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(vectors_of, lookup_of("mean", None), table, asked, offsets)
            for _ in range(8)
        ]
        for job in jobs:
            same_bits(job.result(), whole)


def test_ids_have_any_shape_and_rows_are_given_by_id(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    layer = written(tmp_path, "0", "float32", 5, 9, draw)
    table = BundleTable([layer.mapped])
    ids = draw.integers(0, 9, (4, 6)).T  # not contiguous
    vectors = vectors_of(lookup_of("none", None), table, ids, None)
    assert vectors.shape == (6, 4, 5)
    same_bits(vectors[2, 3], layer.rows[int(ids[2, 3])])
    rows = table.rows(np.array([3, 3, 0]))
    assert rows.shape == (3, 5) and rows.dtype == np.float32
    same_bits(rows[2], layer.rows[0])
    assert vectors_of(lookup_of("none", None), table, ids[:0], None).shape == (0, 4, 5)


def test_an_id_outside_is_refused(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    base = written(tmp_path, "0", "int8", 4, 7, draw)
    newer = written(tmp_path, "1", "int8", 4, np.array([2, 5]), draw)
    table = BundleTable([base.mapped, newer.mapped])
    for wrong in (-1, 7, 2**62, -(2**63)):
        with pytest.raises(IdError, match=rf"Table '0': id {wrong} is outside \[0, 7\)"):
            table.rows(np.array([0, wrong, 3]))
    ids, offsets = np.array([1, 9, 1]), np.array([0, 1, 3])
    with pytest.raises(IdError, match="id 9 "):
        vectors_of(lookup_of("sum", 8), table, ids, offsets)
    same_bits(
        vectors_of(lookup_of("sum", 9), table, ids, offsets),
        np.array([base.rows[1] + np.float32(0)] * 2),
    )
    none = written(tmp_path, "2", "float32", 4, 0, draw)
    with pytest.raises(IdError, match=r"outside \[0, 0\)"):
        BundleTable([none.mapped]).rows(np.array([0]))


@pytest.mark.parametrize(
    "offsets", [[1, 3], [0, 2], [0, 4], [0, 2, 1, 3], [], [0, -1, 3], [0, 2**62, 3]]
)
def test_offsets_that_do_not_fit_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    table = BundleTable([written(tmp_path, "0", "float16", 4, 7, np.random.default_rng(4)).mapped])
    with pytest.raises(ValueError, match="offsets|negative"):
        vectors_of(lookup_of("sum", None), table, np.arange(3), np.array(offsets, np.int64))
    with pytest.raises(TypeError, match="expected an array of one of the kinds"):
        vectors_of(lookup_of("sum", None), table, np.arange(3.0), np.array([0, 3]))


def test_ids_of_a_damaged_file_stay_inside(tmp_path: Path, isa: str) -> None:
    """Ids that do not rise, or repeat, may not be found; those that are have their row."""
    draw = np.random.default_rng(5)
    for trial in range(30):
        count = int(draw.choice([1, 64, 65, 200, 1000]))
        ids = draw.integers(-(2**63), 2**63 - 1, count)
        ids[draw.random(count) < 0.3] = ids[0]
        layer = written(tmp_path, str(trial), "int4", 6, ids, draw)
        asked = np.concatenate([ids, draw.integers(-(2**63), 2**63 - 1, 50)])
        rows = BundleTable([layer.mapped]).rows(asked)
        by_id: dict[int, list[bytes]] = {}
        raw = {
            "rows": np.asarray(layer.mapped.rows),
            "scales": np.asarray(layer.mapped.scales),
        }
        for at, id_ in enumerate(ids.tolist()):
            by_id.setdefault(id_, []).append(row_of(raw, "int4", 6, at).tobytes())
        default = np.asarray(layer.mapped.default.vector).tobytes()
        for id_, row in zip(asked.tolist(), rows, strict=True):
            assert row.tobytes() in [default, *by_id.get(id_, [])]


@pytest.mark.parametrize("part", ["rows", "scales", "default", "ids"])
def test_files_that_are_not_what_the_manifest_says(tmp_path: Path, part: str) -> None:
    about = written(tmp_path, "0", "int8", 4, np.arange(5), np.random.default_rng(6)).mapped.about
    path = tmp_path / f"0.{part}.npy"
    whole, right = path.read_bytes(), np.load(path)
    for wrong in (
        right[:-1],
        right.astype(np.float64),
        np.asfortranarray(np.stack([right, right])),
    ):
        np.save(path, wrong)
        with pytest.raises(BundleError, match=rf"0\.{part}\.npy is damaged: expected"):
            MappedRows(str(tmp_path), about)
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(BundleError, match=rf"0\.{part}\.npy is damaged"):
            MappedRows(str(tmp_path), about)


def test_layers_of_other_dims_are_refused(tmp_path: Path) -> None:
    draw = np.random.default_rng(7)
    layers = [written(tmp_path, str(dim), "int8", dim, np.arange(5), draw).mapped for dim in (4, 5)]
    with pytest.raises(BundleError, match="rows of 4 have 4 columns, and newer ones of 5 5"):
        BundleTable(layers)


def test_the_core_refuses_arrays_that_do_not_fit() -> None:
    rows, default = np.zeros((3, 4), np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="different numbers of rows"):
        _core.ServedTable([(0, rows.ravel()[:-1], None, None)], default, 2)
    with pytest.raises(ValueError, match="different numbers of rows"):
        _core.ServedTable([(0, rows, None, np.arange(2))], default, None)
    for bands in ([], [(0, 0, 0.0, 0.0, 0.0, 0.0)], [(-4, 0, 0.0, 0.0, 0.0, 0.0)]):
        with pytest.raises(ValueError, match="no numbers"):
            _core.ServedTable([(0, rows, None, None)], (bands, 1, None, _core.DType.f32), None)
    with pytest.raises(ValueError, match="fewer rows than ids"):
        _core.ServedTable([(0, rows, None, None)], default, 4)
    with pytest.raises(ValueError, match="stored as"):
        _core.ServedTable([(4, rows, None, None)], default, 3)
    with pytest.raises(ValueError, match="layers"):
        _core.ServedTable([], default, 3)
    table = _core.ServedTable([(0, rows, None, None)], default, 3)
    ids, out = np.arange(3), np.empty((3, 4), np.float32)
    for request in (
        (table, ids, None, 0, None, out[:2]),
        (table, ids, None, 5, None, out),
        (table, ids, np.arange(4), 0, None, out),
    ):
        with pytest.raises(ValueError):
            _core.look_up([request])
    with pytest.raises(TypeError):
        _core.look_up([(table, ids)])
    out.flags.writeable = False
    with pytest.raises((BufferError, ValueError), match="read-only|writable"):
        _core.look_up([(table, ids, None, 0, None, out)])
