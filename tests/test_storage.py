"""`Storage`: how sizes are written, and everything that is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.storage import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (12345, 12345),
        ("12345", 12345),
        ("7B", 7),
        ("8KB", 8_000),
        ("8kb", 8_000),
        ("8 MB", 8_000_000),
        ("  2GB  ", 2_000_000_000),
        ("0.5TB", 500_000_000_000),
        ("1KiB", 1024),
        ("1.5 MiB", 1_572_864),
        ("3gib", 3 << 30),
        ("1TiB", 1 << 40),
        (np.int64(12345), 12345),
        (np.uint8(200), 200),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        -1,
        np.int32(-1),
        True,
        np.True_,
        1.5,
        np.float32(2),
        None,
        "",
        "GB",
        "-1GB",
        "1e9",
        "8 G B",
        "8XB",
        "8EB",
        "1,000",
        [1],
        "1/2",
    ],
)
def test_what_is_no_size_is_refused_by_its_value(text: Any) -> None:
    with pytest.raises(hb.StorageError) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value) and "8GB" in str(caught.value)


@pytest.mark.parametrize(
    "size", [2**60 + 1, 10**30, 10**4000, "1152921504.606846977GB", "9" * 400, "2000000TB"]
)
def test_sizes_beyond_counting_are_refused(size: int | str) -> None:
    """What the core counts with has 64 bits."""
    for name in ("host", "device"):
        budgets: Any = {"host": 1, name: size}
        with pytest.raises(hb.StorageError, match=rf"Storage\({name}=.*2\*\*60") as caught:
            hb.Storage(**budgets)
        assert len(str(caught.value)) < 400
    assert parse_bytes(2**60) == parse_bytes("1152921504.606846976GB") == 2**60


def test_sizes_of_any_length_are_told_in_few_words() -> None:
    with pytest.raises(hb.StorageError) as caught:
        hb.Storage(host="9" * 5000)
    with pytest.raises(hb.StorageError) as caught:
        hb.Storage(host=10**5000)  # beyond what Python prints
    assert len(str(caught.value)) < 400


def test_fields_are_read_once() -> None:
    storage = hb.Storage(device="4KB", host="2MB")
    assert (storage.device, storage.host) == (4000, 2_000_000)
    assert storage.budgets == (4000, 2_000_000)
    assert storage.tiered
    with pytest.raises(dataclasses.FrozenInstanceError):
        storage.device = 1


def test_without_a_device_the_host_computes(tmp_path: Path) -> None:
    assert hb.Storage(host=100).budgets == (100, 0)
    assert not hb.Storage(host=100).tiered
    storage = hb.Storage(host=100, ssd=tmp_path / "log")
    assert storage.budgets == (100, 0) and storage.tiered
    assert storage.ssd == str(tmp_path / "log")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "4 parsecs", "host": 1}, "'4 parsecs'"),
        ({"host": "many"}, "'many'"),
        ({"host": 0}, "host=0"),
        ({"device": "0GB", "host": 1}, "device='0GB'"),
        ({"device": 100}, "host="),
        ({"ssd": "somewhere"}, "host="),
        ({"host": 1, "space_ratio": 1.1}, "space_ratio=1.1"),
        ({"host": 1, "space_ratio": 101}, "space_ratio=101"),
        ({"host": 1, "space_ratio": float("nan")}, "space_ratio=nan"),
        ({"host": 1, "space_ratio": "2"}, "space_ratio='2'"),
        ({"host": 1, "space_ratio": np.float64("inf")}, "space_ratio=np.float64(inf)"),
        ({"host": 1, "space_ratio": None}, "space_ratio=None"),
        ({"host": 1, "reset": "no"}, "reset='no'"),
        ({"host": 1, "reset": 1}, "reset=1"),
        ({"host": 1, "ssd": 5}, "ssd=5"),
        ({"host": 1, "ssd": True}, "ssd=True"),
        ({"host": 1, "ssd": ""}, "empty"),
        ({"host": 1, "ssd": "/tmp/a\0b"}, "NUL"),
        ({"host": 1, "ssd": b"/tmp/a\0b"}, "NUL"),
        ({"host": 1, "ssd": "/tmp/" + 300 * "a"}, "300 in its longest name"),
        ({"host": 1, "ssd": "/tmp/" + 130 * "ä"}, "260 in its longest name"),
        ({"host": 1, "ssd": 21 * ("/" + 200 * "a")}, "4,221 bytes"),
        ({"host": 1, "ssd": 20 * ("/" + 202 * "a")}, "4,060 bytes"),
        ({"host": 1, "ssd": "/tmp/a\udcff"}, "UTF-8"),
        ({"host": 1, "ssd": "/tmp/a\ud800"}, "UTF-8"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(hb.StorageError) as caught:
        hb.Storage(**arguments)
    assert said in str(caught.value)


def test_a_directory_may_be_given_in_any_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("log", Path("log"), b"log", "./x/../log", str(tmp_path / "log")):
        storage: Any = {"host": 100, "ssd": given}
        assert hb.Storage(**storage).ssd == str(tmp_path / "log")
    again = dataclasses.replace(hb.Storage(host=100, ssd="log"), reset=True)
    assert again.reset and again.ssd == str(tmp_path / "log")


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(hb.StorageError, match="ssd='log'"):
        hb.Storage(host=100, ssd="log")


@pytest.mark.parametrize("storage", ["4GB", 4_000_000_000, {"host": "4GB"}, hb.Storage])
def test_what_is_no_storage_is_refused(storage: Any) -> None:
    with pytest.raises(hb.StorageError, match=r"storage must be a hotbed\.Storage"):
        hb.EmbeddingCollection([hb.Table("item", dim=4)], storage=storage)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("rows?")
    with pytest.raises(hb.StorageError, match="give a directory"):
        hb.Storage(host=100, ssd=path)


def test_rows_that_fit_nowhere_are_refused_at_once() -> None:
    tables = [hb.Table("item", dim=4, rows=100), hb.Table("user", dim=4)]
    with pytest.raises(hb.StorageError, match=r"4,096 bytes.*ssd="):
        hb.EmbeddingCollection(tables, storage=hb.Storage(host=4095))
    collection = hb.EmbeddingCollection(tables, storage=hb.Storage(host=4096))
    assert collection.group.tiers is None and "rows_from_ssd" not in collection.stats()


@pytest.mark.parametrize("ssd", ["", b"", ["somewhere", ""]])
def test_an_empty_path_is_said_once(ssd: Any) -> None:
    with pytest.raises(hb.StorageError) as caught:
        hb.Storage(host=1, ssd=ssd)
    assert re.fullmatch(r"Storage\(ssd=b?''\) is no path: it is empty\.", str(caught.value))


def test_a_ratio_of_numpy_is_a_number() -> None:
    assert hb.Storage(host=1, space_ratio=np.float32(1.5)) == hb.Storage(host=1, space_ratio=1.5)
    assert type(hb.Storage(host=1, space_ratio=np.int64(2)).space_ratio) is float
