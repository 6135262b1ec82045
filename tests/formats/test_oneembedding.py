"""Folders of OneEmbedding's persistent tables, whose files are put together here; and OpenEmbedding's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats.format_tables import imported, refused, run

BLOCK = 512


class Store:
    """A persistent table as its source has it: rows are only ever appended, in blocks, in chunks."""

    def __init__(self, folder: Path, width: int, key: str = "i8", blocks: int = 2) -> None:
        self.folder, self.width, self.key, self.blocks = folder, width, key, blocks
        self.size = 4 * width
        self.block = BLOCK if self.size <= BLOCK else -(-self.size // BLOCK) * BLOCK
        self.in_block = self.block // self.size
        self.place: dict[int, int] = {}
        self.next = 0
        folder.mkdir(parents=True)
        (folder / "LOCK").touch()
        sizes = {
            "KEY_SIZE": int(key[1]),
            "VALUE_SIZE": self.size,
            "PHYSICAL_BLOCK_SIZE": BLOCK,
            "NUM_LOGICAL_BLOCKS_PER_CHUNK": blocks,
        }
        for name, size in sizes.items():
            (folder / name).write_text(f"{size}\n")
        for name in ("keys", "values"):
            (folder / name).mkdir()

    def put(self, keys: list[int], rows: np.ndarray) -> None:
        """Pads the last block, as they do."""
        for at, key in enumerate(keys):
            chunk, place = divmod(self.next, self.blocks * self.in_block)
            block, inside = divmod(place, self.in_block)
            self._write("keys/key", chunk, place * int(self.key[1]), np.array([key], self.key), 0)
            end = (block + 1) * self.block
            offset = block * self.block + inside * self.size
            self._write("values/value", chunk, offset, rows[at].astype("<f4"), end)
            self.place[key] = self.next
            self.next += 1
        self.next += -self.next % self.in_block

    def _write(self, stem: str, chunk: int, offset: int, array: np.ndarray, end: int) -> None:
        path = self.folder / f"{stem}-{chunk:012d}"
        raw = bytearray(path.read_bytes()) if path.exists() else bytearray()
        raw.extend(b"\xee" * (max(end, offset + array.nbytes) - len(raw)))
        raw[offset : offset + array.nbytes] = array.tobytes()
        path.write_bytes(raw)

    def snapshot(self, name: str) -> None:
        folder = self.folder / "snapshots" / name
        folder.mkdir(parents=True)
        chunks: dict[int, list[int]] = {}
        for place in self.place.values():
            chunks.setdefault(place // (self.blocks * self.in_block), []).append(place)
        for chunk, places in chunks.items():
            (folder / f"index-{chunk:012d}").write_bytes(np.array(places[::-1], "<u8").tobytes())
        (folder / "LIST").write_text("".join(f"index-{chunk:012d}\n" for chunk in sorted(chunks)))


@pytest.mark.parametrize("key", ["i8", "i4"])
@pytest.mark.parametrize("width", [1, 3, 12, 48, 128, 200])
def test_the_rows_of_a_snapshot(tmp_path: Path, width: int, key: str) -> None:
    random = np.random.default_rng(width)
    ids = random.permutation(np.array([-1, np.iinfo(key).min, *range(1, 60)]))
    rows = random.normal(size=(len(ids), width)).astype("f4")
    stores = [Store(tmp_path / "user" / f"{rank}-2", width, key) for rank in range(2)]
    for rank, store in enumerate(stores):
        own = np.flatnonzero(ids % 2 == rank)
        store.put(ids[own].tolist(), rows[own] + 1)
        store.snapshot("early")
        store.put(ids[own[::2]].tolist(), rows[own[::2]])
        store.put(ids[own[1::2]].tolist(), rows[own[1::2]])
        store.snapshot("late")
    dim = (width + 2) // 3
    options = ("--dim", dim, "--snapshot")
    order = ids.argsort()
    for name, change in (("early", 1), ("late", 0)):
        found, vectors = imported(tmp_path / "user", tmp_path / name, *options, name)["user"]
        assert found.tolist() == ids[order].tolist()
        assert torch.equal(vectors, torch.from_numpy(rows[order, :dim] + np.float32(change)))


def store(folder: Path, **options: Any) -> Store:
    made = Store(folder, 6, **options)
    made.put([*range(50)], np.random.default_rng(0).normal(size=(50, 6)))
    made.snapshot("a")
    return made


def test_the_folder_of_one_rank(tmp_path: Path) -> None:
    made = store(tmp_path / "item")
    said = refused("import", tmp_path / "item", "--to", tmp_path / "no")
    assert "rows of 6 numbers, the vector first, then states" in said and "with --dim" in said
    assert "with --dim" in refused("import", tmp_path / "item", "--to", tmp_path / "no", "--dim", 7)
    code, said = run("import", tmp_path / "item", "--to", tmp_path / "run", "--dim", 2)
    assert code == 0 and "item" in said and "50" in said
    made.snapshot("b")
    said = refused("import", tmp_path / "item", "--to", tmp_path / "no", "--dim", 2)
    assert "say which snapshot, with --snapshot; there are a, b" in said
    options = ("--dim", 2, "--snapshot", "c")
    assert "no snapshot 'c'" in refused(
        "import", tmp_path / "item", "--to", tmp_path / "no", *options
    )


def test_an_empty_snapshot(tmp_path: Path) -> None:
    made = Store(tmp_path / "t", 4)
    made.snapshot("a")
    assert imported(tmp_path / "t", tmp_path / "run", "--dim", 4)["t"][1].shape == (0, 4)


def test_ranks_belong_together(tmp_path: Path) -> None:
    for name in ("0-2", "1-2"):
        store(tmp_path / "t" / name)
    options = ("--to", tmp_path / "no", "--dim", 2)
    assert "rows of one rank of 2" in refused("import", tmp_path / "t" / "1-2", *options)
    assert "has the id 0 twice" in refused("import", tmp_path / "t", *options)
    os.rename(tmp_path / "t" / "1-2", tmp_path / "t" / "1-3")
    assert "folders of all ranks" in refused("import", tmp_path / "t", *options)
    os.rename(tmp_path / "t" / "1-3", tmp_path / "elsewhere")
    assert "it has 0-2" in refused("import", tmp_path / "t", *options)


def test_the_snapshot_that_all_ranks_have(tmp_path: Path) -> None:
    for rank in range(2):
        made = Store(tmp_path / "t" / f"{rank}-2", 4)
        made.put([rank], np.ones((1, 4)))
        made.snapshot("b")
        made.snapshot(f"only {rank}")
    assert imported(tmp_path / "t", tmp_path / "run", "--dim", 4)["t"][0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("file", "contents", "why"),
    [
        ("KEY_SIZE", b"2\n", "ids of 2 bytes"),
        ("VALUE_SIZE", b"x", "VALUE_SIZE has no size in it"),
        ("VALUE_SIZE", b"6", "of no float32"),
        ("VALUE_SIZE", b"0", "VALUE_SIZE has no size in it"),
        ("PHYSICAL_BLOCK_SIZE", None, "PHYSICAL_BLOCK_SIZE: No such file"),
        ("keys/key-000000000000", b"", "names rows that"),
        ("values/value-000000000000", b"", "names rows that"),
        ("values/value-000000000000", None, "value-000000000000: No such file"),
        ("snapshots/a/LIST", b"", "no snapshot that was finished"),
        ("snapshots/a/LIST", b"../../x\n", "no snapshot that was finished"),
        ("snapshots/a/LIST", b"\xff\xfe\n", "no snapshot that was finished"),
        ("snapshots/a/LIST", b"index-000000000000\n" * 999, "no snapshot that was finished"),
        ("NUM_LOGICAL_BLOCKS_PER_CHUNK", b"9" * 30, "PER_CHUNK has no size in it"),
        ("VALUE_SIZE", b"9" * 32, "VALUE_SIZE has no size in it"),
        ("snapshots/a/index-000000000000", b"\xff" * 8, "names rows that"),
        ("snapshots/a/index-000000000000", b"\0" * 9, "names rows that"),
        ("snapshots/a/index-000000000000", (50).to_bytes(8, "little"), "names rows that"),
        ("snapshots/a/index-000000000000", b"\0" * 16, "has the id 0 twice"),
        ("snapshots/a/index-000000000000", None, "no snapshot that was finished"),
    ],
)
def test_stores_that_are_damaged(tmp_path: Path, file: str, contents: Any, why: str) -> None:
    path = store(tmp_path / "t", blocks=10).folder / file
    path.unlink()
    if contents is not None:
        path.write_bytes(contents)
    said = refused("import", tmp_path / "t", "--to", tmp_path / "run", "--dim", 2)
    assert why in said and str(tmp_path / "t") in said
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_chunk_that_begins_beyond_64_bits(tmp_path: Path) -> None:
    folder = store(tmp_path / "t", blocks=10).folder
    (folder / "NUM_LOGICAL_BLOCKS_PER_CHUNK").write_text(str(1 << 40))
    last = "9" * 12
    for name in ("keys/key", "values/value", "snapshots/a/index"):
        (folder / f"{name}-{'0' * 12}").rename(folder / f"{name}-{last}")
    (folder / "snapshots/a/LIST").write_text(f"index-{last}\n")
    said = refused("import", tmp_path / "t", "--to", tmp_path / "run", "--dim", 2)
    assert f"index-{last} names rows that" in said


def test_more_places_than_rows_are_not_read(tmp_path: Path) -> None:
    folder = store(tmp_path / "t", blocks=10).folder
    with open(folder / "snapshots/a/index-000000000000", "r+b") as file:
        file.truncate(1 << 26)
    said = refused("import", tmp_path / "t", "--to", tmp_path / "run", "--dim", 2)
    assert "index-000000000000 names rows that" in said


def test_openembedding_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "saved" / "openembedding"
    folder.mkdir(parents=True)
    (folder / "model_meta").write_text('{"version": "0.2"}')
    for path in (folder, tmp_path / "saved"):
        said = refused("import", path, "--to", tmp_path / "run")
        assert "OpenEmbedding's own serialization" in said and "write them as Parquet" in said
