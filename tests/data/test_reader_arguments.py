"""Numbers and paths that readers and generators are given: what is none is refused at once, by its name."""

import gzip
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.click_logs import good_line
from data.test_criteo import rows_of, write

import hotbed as hb
from hotbed.data import CriteoLog, hash_ids, synthetic_clicks, write_criteo_tsv

NO_COUNTS = [True, np.True_, 2.0, np.float32(3), "8", None, -1, 2**63, 2**70, float("nan")]
NO_SEEDS = [-1, 2**64, 2.5, True, "a", b"1"]


@pytest.mark.parametrize("value", NO_COUNTS)
def test_counts(value: Any, tmp_path: Any) -> None:
    path = write(tmp_path / "a", [good_line(0)])
    log = CriteoLog(path)
    with pytest.raises(hb.InputError, match="batch_size is "):
        CriteoLog(path, value)
    with pytest.raises(hb.InputError, match="batch_size is "):
        synthetic_clicks(5, value)
    with pytest.raises(hb.InputError, match="rows is "):
        synthetic_clicks(value)
    with pytest.raises(hb.InputError, match="rows is "):
        write_criteo_tsv(tmp_path / "b", value)
    with pytest.raises(hb.InputError, match="epoch is "):
        log.seek(value)
    with pytest.raises(hb.InputError, match="batches is "):
        log.seek(1, value)
    if value is not None:
        with pytest.raises(hb.InputError, match="rows is "):
            log.split(0.5, value)
        with pytest.raises(hb.InputError, match="rows is "):
            log.fingerprint(value)
    if not isinstance(value, bool):
        with pytest.raises(hb.InputError, match="shuffle is "):
            CriteoLog(path, shuffle=value)
    if value is not None and value != -1:
        with pytest.raises(hb.InputError, match="rows begin or end with "):
            CriteoLog(path, rows=(0, value))
        with pytest.raises(hb.InputError, match="rows begin or end with "):
            CriteoLog(path, rows=slice(value, None))
    with pytest.raises(hb.InputError, match="table_rows of C3 is "):
        synthetic_clicks(5, table_rows=[5, 5, value, *[5] * 23])
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("value", NO_SEEDS)
def test_seeds(value: Any, tmp_path: Any) -> None:
    path = write(tmp_path / "a", [good_line(0)])
    for make in (
        lambda: CriteoLog(path, shuffle=True, seed=value),
        lambda: synthetic_clicks(5, seed=value),
        lambda: write_criteo_tsv(tmp_path / "b", 5, value),
        lambda: hash_ids(["a"], seed=value),
    ):
        with pytest.raises(hb.InputError, match="seed must be an integer in"):
            make()


def test_numbers_of_other_libraries(tmp_path: Any) -> None:
    path = write(tmp_path / "a", [good_line(i) for i in range(20)])
    for five in (np.int32(5), np.uint64(5), torch.tensor(5)):
        assert rows_of(CriteoLog(path, five, shuffle=five, rows=(five, None), seed=five))
        made = list(synthetic_clicks(five, five, seed=five))
        assert torch.equal(made[0]["C3"], next(iter(synthetic_clicks(5, 5, seed=5)))["C3"])
        assert hash_ids("a", seed=five) == hash_ids("a", seed=5)
    parts = CriteoLog(path).split(torch.tensor(0.25))
    assert [len(rows_of(part)) for part in parts] == [15, 5]


@pytest.mark.parametrize("rows", [5, "ab", (1, 2, 3), [], {1}])
def test_ranges(rows: Any, tmp_path: Any) -> None:
    with pytest.raises(hb.InputError, match="rows "):
        CriteoLog(write(tmp_path / "a", [good_line(0)]), rows=rows)


@pytest.mark.parametrize("value", ["0.5", True, None, float("nan"), object()])
def test_real_numbers(value: Any, tmp_path: Any) -> None:
    with pytest.raises(hb.InputError, match="alpha is "):
        synthetic_clicks(5, alpha=value)
    with pytest.raises(hb.InputError, match="click_rate is "):
        synthetic_clicks(5, click_rate=value)
    with pytest.raises(hb.InputError, match="test_fraction is "):
        CriteoLog(write(tmp_path / "a", [good_line(0)])).split(value)


@pytest.mark.parametrize("size", [2**62, 2**63 - 1])
def test_a_batch_takes_the_room_of_its_rows(size: int, tmp_path: Any, monkeypatch: Any) -> None:
    """However many rows it may have: all of a log as one batch, or permuted as one window."""
    monkeypatch.setattr("hotbed.data.criteo_lines._ROOM", 3)
    lines = [good_line(i) for i in range(50)]
    lines[20] = "malformed"
    path = write(tmp_path / "a", lines)
    rows = [i for i in range(50) if i != 20]
    (whole,) = CriteoLog(path, size, on_error="skip", line_numbers=True)
    assert rows_of([whole]) == rows and whole["line"].tolist() == [i + 1 for i in rows]
    expected = list(CriteoLog(path, 50, on_error="skip"))[0]
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    permuted = rows_of(CriteoLog(path, 7, on_error="skip", shuffle=size, seed=1))
    assert permuted != rows and sorted(permuted) == rows
    # Workers look for their own parts far beyond the end.
    loader = torch.utils.data.DataLoader(
        CriteoLog(path, size, on_error="skip"), batch_size=None, num_workers=2
    )
    assert rows_of(loader) == rows


@pytest.mark.parametrize("path", ["", b""])
def test_no_path(path: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    with pytest.raises(hb.InputError, match="path is empty"):
        write_criteo_tsv(path, 3)
    assert os.listdir(tmp_path) == ["in"]


def test_paths_of_bytes(tmp_path: Any) -> None:
    names = [os.fsencode(tmp_path / name) for name in ("a", "a.gz")]
    for name in names:
        write_criteo_tsv(name, 3)
        assert len(rows_of(CriteoLog(name))) == 3
    assert len(rows_of(CriteoLog(names))) == 6
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == (tmp_path / "a").read_bytes()
    for wrong in (5, None, True, [5], [None]):
        with pytest.raises(TypeError, match="paths"):
            CriteoLog(wrong)


def test_a_pipe_that_gives_one_byte_first(tmp_path: Any) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = gzip.compress((good_line(1) + "\n").encode())
    one = threading.Event()

    def feed() -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(data[:1])
            one.wait()
            file.write(data[1:])

    thread = threading.Thread(target=feed)
    thread.start()
    read = os.read

    class First:
        """The pipe as the reader opens it: the rest is written after the first byte was read."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = open(*arguments, **options)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def read(self, size: int) -> bytes:
            found = read(self.file.fileno(), size)
            one.set()
            return found

        def fileno(self) -> int:
            return self.file.fileno()

    import hotbed.data.lines as lines

    lines.open = First  # type: ignore[attr-defined]
    try:
        assert rows_of(CriteoLog(path)) == [1]
    finally:
        del lines.open  # type: ignore[attr-defined]
        one.set()
        thread.join()


def test_lists_without_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = "a"
    for _ in range(5000):
        deep = [deep]
    for values in (endless, deep):
        for ids in (hb.data.hash_ids, hb.data.criteo_ids):
            with pytest.raises(hb.InputError):
                ids(values)


def test_a_log_is_read_whatever_the_default_device(tmp_path: Any) -> None:
    path = write(tmp_path / "a", [good_line(0), "malformed", good_line(2)])
    with torch.device("meta"):
        log = CriteoLog(path, 2, on_error="skip", shuffle=10)
        assert sorted(rows_of(log)) == [0, 2] and log.skipped.lines == 1
        hb.erase(
            hb.EmbeddingCollection([hb.Table("a", 2), hb.Table("b", 2)], device="cpu"), {"a": [1]}
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("paths", 3),
        ("paths", []),
        ("schema", {"click": "label"}),
        ("columns", "click"),
        ("columns", [1]),
        ("drop_last", 2),
        ("stop", -3),
    ],
)
def test_fields_are_checked_when_they_are_set_later(
    tmp_path: Path, option: str, value: object
) -> None:
    (tmp_path / "a.csv").write_text("click,item\n1,2\n0,3\n")
    schema = hb.data.Schema({"click": hb.data.Label(), "item": hb.data.Id()})
    files = hb.data.open(tmp_path / "a.csv", schema, 2)
    was = getattr(files, option)
    with pytest.raises((hb.HotbedError, TypeError), match=option):
        setattr(files, option, value)
    assert getattr(files, option) == was
    assert sum(len(batch["label"]) for batch in files) == 2
