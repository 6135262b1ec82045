"""`hash_ids` beside XXH64 written out from its specification, and the forms that values come in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb

hash_ids = hb.data.hash_ids

WORD = 2**64 - 1
P1, P2, P3, P4, P5 = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)


def rotated(x: int, by: int) -> int:
    return (x << by | x >> 64 - by) & WORD


def one_round(lane: int, word: int) -> int:
    return rotated(lane + word * P2 & WORD, 31) * P1 & WORD


def xxh64(data: bytes, seed: int = 0) -> int:
    """https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md"""
    size = len(data)
    hash = seed + P5 & WORD
    if size >= 32:
        lanes = [seed + P1 + P2 & WORD, seed + P2 & WORD, seed, seed - P1 & WORD]
        while len(data) >= 32:
            words = [int.from_bytes(data[k : k + 8], "little") for k in (0, 8, 16, 24)]
            lanes = [one_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            data = data[32:]
        hash = sum(rotated(x, by) for x, by in zip(lanes, (1, 7, 12, 18), strict=True)) & WORD
        for lane in lanes:
            hash = ((hash ^ one_round(0, lane)) * P1 + P4) & WORD
    hash = hash + size & WORD
    while len(data) >= 8:
        hash ^= one_round(0, int.from_bytes(data[:8], "little"))
        hash, data = (rotated(hash, 27) * P1 + P4) & WORD, data[8:]
    if len(data) >= 4:
        hash ^= int.from_bytes(data[:4], "little") * P1 & WORD
        hash, data = (rotated(hash, 23) * P2 + P3) & WORD, data[4:]
    for byte in data:
        hash = rotated(hash ^ byte * P5 & WORD, 11) * P1 & WORD
    hash = (hash ^ hash >> 33) * P2 & WORD
    hash = (hash ^ hash >> 29) * P3 & WORD
    return hash ^ hash >> 32


def signed(hash: int) -> int:
    return hash - 2**64 if hash >= 2**63 else hash


@given(
    st.lists(st.binary(max_size=100) | st.text(max_size=40) | st.integers(-(2**63), 2**64 - 1)),
    st.integers(0, 2**64 - 1),
)
def test_every_value_has_the_hash_of_its_bytes(values: list[Any], seed: int) -> None:
    data = [
        v.encode()
        if isinstance(v, str)
        else v
        if isinstance(v, bytes)
        else (v % 2**64).to_bytes(8, "little")
        for v in values
    ]
    assert hash_ids(values, seed=seed).tolist() == [signed(xxh64(d, seed)) for d in data]
    kinds = [[v for v in values if isinstance(v, kind)] for kind in (str, bytes, int)]
    for same in kinds:
        found = dict(zip(values, hash_ids(values, seed=seed).tolist(), strict=True))
        assert hash_ids(same, seed=seed).tolist() == [found[v] for v in same]


def test_the_oracle_has_published_values() -> None:
    assert xxh64(b"") == 0xEF46DB3751D8E999 and xxh64(b"abc") == 0x44BC2CF5AD770999
    assert xxh64(b"Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1


def test_ids_never_change() -> None:
    """What is stored under these ids must be found again by every later version."""
    assert hash_ids(["", "a", "user-17", "München", "東京"]).tolist() == [
        -1205034819632174695,
        -3292477735350538661,
        -280232040987826713,
        -3841199323395473262,
        -7688540905579211692,
    ]
    assert hash_ids([0, 1, -1, 2**63 - 1, -(2**63)]).tolist() == [
        3803688792395291579,
        -6977822845260490347,
        -8804195676797548855,
        -40307683044198644,
        4558309869707674848,
    ]
    assert hash_ids("a", seed=1).item() == -2395144786285869370


def test_integers_of_every_type_agree() -> None:
    small = hash_ids([0, 1, 100])
    for dtype in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i8", ">u2"):
        assert torch.equal(hash_ids(np.array([0, 1, 100], dtype)), small)
    for tensor in (torch.uint8, torch.int32, torch.int64):
        assert torch.equal(hash_ids(torch.tensor([0, 1, 100], dtype=tensor)), small)
    assert torch.equal(hash_ids(np.arange(101)[::-1][[100, 99, 0]]), small)
    assert hash_ids(np.array([2**64 - 1], np.uint64)).tolist() == hash_ids([-1]).tolist()
    assert hash_ids([2**64 - 1, 0]).tolist() == hash_ids([-1, 0]).tolist()


class Column:
    """As a column of pandas or Arrow."""

    def __init__(self, *values: Any) -> None:
        self.array = np.empty(len(values), dtype=object)
        self.array[:] = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array

    def __repr__(self) -> str:
        return f"Column({self.array.tolist()})"


def test_forms_of_strings_agree() -> None:
    words = ["a", "", "Ünï", "東京"]
    want = hash_ids(words)
    for form in (tuple(words), np.array(words), np.array(words, object), Column(*words)):
        assert torch.equal(hash_ids(form), want)
    encoded = [w.encode() for w in words]
    assert torch.equal(hash_ids(encoded), want)
    assert torch.equal(hash_ids(np.array(encoded)), want)
    assert torch.equal(hash_ids([bytearray(w) for w in encoded]), want)
    assert torch.equal(hash_ids([np.str_(w) for w in words]), want)
    if hasattr(np.dtypes, "StringDType"):
        assert torch.equal(hash_ids(np.array(words, np.dtypes.StringDType())), want)
    assert torch.equal(hash_ids([1, "1", b"1"]), torch.stack([hash_ids(v) for v in (1, "1", b"1")]))
    # A trailing NUL is part of a string, as long as NumPy does not hold it.
    assert hash_ids("a\0").item() != hash_ids("a").item()


@pytest.mark.parametrize("library", ["pyarrow", "pandas"])
def test_columns_of_data_frames(library: str) -> None:
    frames = pytest.importorskip(library)
    make = frames.array if library == "pyarrow" else frames.Series
    assert torch.equal(hash_ids(make(["a", "b"])), hash_ids(["a", "b"]))
    assert torch.equal(hash_ids(make([1, 2])), hash_ids([1, 2]))
    with pytest.raises(hb.InputError, match="value 1 is missing"):
        hash_ids(make(["a", None]))
    with pytest.raises(hb.InputError, match="float"):
        hash_ids(make([1, None]))


def test_shapes_are_kept() -> None:
    assert hash_ids("a").shape == ()
    assert hash_ids([]).shape == (0,) and hash_ids([[], []]).shape == (2, 0)
    nested = [[["a", "b"], ["c", "d"]]]
    assert hash_ids(nested).shape == (1, 2, 2)
    assert hash_ids(nested).flatten().tolist() == hash_ids(list("abcd")).tolist()
    assert torch.equal(hash_ids(np.array(nested)), hash_ids(nested))
    assert torch.equal(hash_ids([np.array(["a"]), np.array(["b"])]), hash_ids([["a"], ["b"]]))
    assert hash_ids(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
    assert hash_ids(["a"]).dtype == torch.int64


MISSING = "value 1 is missing"
LENGTHS = "lists of different lengths.*Jagged"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["a", None], MISSING),
        (["a", float("nan")], MISSING),
        ([1, None], MISSING),
        (np.array(["a", None], object), MISSING),
        (Column("a", None), MISSING),
        (np.array([1.0, np.nan]), r"value 0 is float 1.0; .*fill them first"),
        ([1.5], "value 0 is float 1.5"),
        ([True], "value 0 is bool True"),
        (np.array([True]), "value 0 is bool True"),
        (torch.tensor([1.0]), "value 0 is float"),
        (torch.tensor([1]).to_sparse(), "a tensor must be dense"),
        (np.ma.array([1, 2], mask=[0, 1]), "a masked array"),
        (None, "value 0 is missing"),
        ({"a"}, "value 0 is set"),
        (np.array(["2020"], "M8[D]"), "value 0 is date"),
        ([2**64], r"18446744073709551616, is outside \[-2\*\*63, 2\*\*64\)"),
        ([-(2**63) - 1], "is outside"),
        (["a", "\ud800"], r"value 1, '\\ud800', has no UTF-8 form"),
        ([["a"], ["b", "c"]], LENGTHS),
        ([["a"], "b"], LENGTHS),
        (Column(["a"], ["b", "c"]), LENGTHS),
    ],
    ids=str,
)
def test_what_has_no_id(values: Any, says: str) -> None:
    with pytest.raises(hb.InputError, match=f"hash_ids: .*{says}"):
        hash_ids(values)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "a", None])
def test_a_seed_is_64_bits(seed: Any) -> None:
    with pytest.raises(hb.InputError, match="seed must be an integer"):
        hash_ids(["a"], seed=seed)


def test_ids_of_strings_train_in_tables() -> None:
    collection = hb.EmbeddingCollection(
        [hb.Table("city", 4), hb.Table("agent", 4, rows=1000)], seed=0
    )
    cities = hash_ids(["Lyon", "Oslo", "Lyon"])
    agents = hash_ids(["x", "y", "z"]) % 1000
    assert bool((agents >= 0).all())
    vectors = collection({"city": cities, "agent": agents})
    assert torch.equal(vectors["city"][0], vectors["city"][2])
    assert collection.count("city") == 2
