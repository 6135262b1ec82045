"""Reads damaged files of one format in bounded memory, and tells how many were read and how many refused.
Anything but an error of Hotbed's ends it."""

from __future__ import annotations

import os
import random
import re
import resource
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotbed.errors import HotbedError

ROWS, DIM = 12, 3
ROOM = 3 << 30
"""Bytes that the program may take beyond what it has when it begins."""


def changed(raw: bytes, chance: random.Random) -> bytes:
    """The bytes of a file, damaged, or as somebody would write them who means harm."""
    text = bytearray(raw)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(8):
            case 0:
                del text[at:]
            case 1:
                text += bytes(chance.randrange(1, 100))
            case 2:
                text[at:at] = chance.randbytes(chance.randint(1, 9))
            case 3:
                del text[at : at + chance.randint(1, 9)]
            case 4:
                numbers = [m.span() for m in re.finditer(rb"\d+", bytes(text))]
                if numbers:
                    begin, end = chance.choice(numbers)
                    digits = chance.choice([1, 3, 10, 13, 19, 5_000])
                    text[begin:end] = b"9" * digits
            case _:
                if at < len(text):
                    text[at] = chance.choice([0, 0x7F, 0xFF, text[at] ^ 1, chance.randrange(256)])
    return bytes(text)


def tables() -> tuple[np.ndarray, np.ndarray]:
    random_ = np.random.default_rng(0)
    return random_.permutation(ROWS), random_.normal(size=(ROWS, DIM)).astype("f4")


def torch_file(folder: Path) -> None:
    ids, rows = map(torch.from_numpy, tables())
    torch.save({"t": rows, "t.ids": ids, "u.weight": rows}, folder / "a.pt")


def legacy_file(folder: Path) -> None:
    _, rows = map(torch.from_numpy, tables())
    torch.save({"u.weight": rows}, folder / "a.pt", _use_new_zipfile_serialization=False)


def safetensors_file(folder: Path) -> None:
    from safetensors.torch import save_file

    ids, rows = map(torch.from_numpy, tables())
    save_file({"t": rows, "t.ids": ids, "u.weight": rows.clone()}, folder / "a.safetensors")


def npy_files(folder: Path) -> None:
    ids, rows = tables()
    for name, array in (("t", rows), ("t.ids", ids), ("u", rows)):
        np.save(folder / f"{name}.npy", array)


def sok_files(folder: Path) -> None:
    ids, rows = tables()
    for name, kind, code, array in (("key", 0, 1, ids), ("weight", 1, 5, rows)):
        head = b"t".rjust(256) + kind.to_bytes(4, "big") + b" " * 32 + code.to_bytes(4, "big")
        (folder / f"t-{name}").write_bytes(head + array.tobytes())


def parquet_file(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids, rows = tables()
    columns = {"id": pa.array(ids), "vector": pa.array([*rows], pa.list_(pa.float32()))}
    about = {b"hotbed.rows": b"12", b"hotbed.table": b"t"}
    pq.write_table(pa.table(columns).replace_schema_metadata(about), folder / "t.parquet")


def dumped_parquet(folder: Path) -> None:
    from hotbed.formats.kinds.parquet import Parquet
    from hotbed.formats.tables import FileTable

    chunk = tuple(map(torch.from_numpy, tables()))
    whole = FileTable("t", ROWS, ROWS, DIM, torch.float32, lambda: iter([chunk]))
    Parquet().write(str(folder / "t.parquet"), [whole])


def oneembedding_files(folder: Path) -> None:
    ids, rows = tables()
    snapshot = folder / "snapshots" / "s"
    for path in (snapshot, folder / "keys", folder / "values"):
        path.mkdir(parents=True)
    sizes = {
        "KEY_SIZE": 8,
        "VALUE_SIZE": 4 * DIM,
        "PHYSICAL_BLOCK_SIZE": 64,
        "NUM_LOGICAL_BLOCKS_PER_CHUNK": 4,
    }
    for name, size in sizes.items():
        (folder / name).write_text(str(size))
    (folder / "keys" / "key-000000000000").write_bytes(ids.tobytes())
    in_block = 64 // (4 * DIM)
    blocks = [
        rows[at : at + in_block].tobytes().ljust(64, b"\0") for at in range(0, ROWS, in_block)
    ]
    (folder / "values" / "value-000000000000").write_bytes(b"".join(blocks))
    (snapshot / "index-000000000000").write_bytes(np.arange(ROWS, dtype="<u8").tobytes())
    (snapshot / "LIST").write_text("index-000000000000\n")


def read_format(name: str, file: str = "") -> Callable[[Path], Any]:
    def read(folder: Path) -> dict[str, Any]:
        from hotbed.formats import READERS
        from hotbed.formats.tables import Hints, chosen, refuse_without_room

        hints = Hints(DIM) if name == "oneembedding" else Hints()
        found = READERS[name].read(str(folder / file), hints)
        taken = chosen(str(folder), found, [table.name for table in found.tables], {})
        refuse_without_room(str(folder), taken)
        numbers = {}
        for table in taken:
            chunks = [(ids.tobytes(), rows.tobytes()) for ids, rows in _arrays(table.chunks())]
            numbers[table.name] = table.rows, str(table.dtype), chunks
        return numbers

    return read


def _arrays(chunks: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for ids, rows in chunks:
        assert ids.dtype == torch.int64 and len(ids) == len(rows)
        yield ids.numpy(), rows.contiguous().numpy()


CONFIG = """data = ["a.tsv", "b.tsv"]\ndim = 16\nlr = 1e-3\nhost = "2GB"\nbatch-size = 512\n"""
TABLES = """[tables.item]\nrows = 10_000\ndim = 64\ndtype = "bfloat16"\nsharding = "row"\n
[tables.user]\ndim = 8\nexpected_rows = 1000\n"""
PLAN = """version = 1\nworld_size = 2\n
[tables.item]\nsharding = "row"\n\n[tables.user]\nsharding = "table"\nkeeper = 1\n"""


def text(name: str, contents: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(contents)

    return write


def read_config(folder: Path) -> Any:
    from hotbed.cli.config import read_config
    from hotbed.train.settings import TrainSettings

    options = read_config(str(folder / "a.toml"), TrainSettings)
    settings = TrainSettings(**{"data": ("x",), **options})
    settings.check_paths(str(folder / "a.toml"))
    settings.storage()
    return settings


def read_tables(folder: Path) -> Any:
    import hotbed as hb
    from hotbed.cli.plan import _of_file

    found, rows, _ = _of_file(str(folder / "a.toml"))
    made = hb.plan(found, 2, expected_rows={"user": 5} | rows)
    return made.printed(80)


def read_plan(folder: Path) -> Any:
    import hotbed as hb
    from hotbed.dist.plans import Plan

    given = [hb.Table("item", dim=64, rows=10_000), hb.Table("user", dim=8)]
    return Plan.read(str(folder / "a.toml"), given).printed(80)


def saved_tensors(folder: Path) -> None:
    from hotbed.checkpoint.tensors import write_tensors

    ids, rows = map(torch.from_numpy, tables())
    write_tensors(str(folder / "a.safetensors"), {"t/ids": ids, "t/weights": rows})


def read_saved(folder: Path) -> Any:
    """A file whose checksums are right, by somebody who means harm."""
    from hotbed.checkpoint.tensors import _Checksums, read_tensors

    path = folder / "a.safetensors"
    sums = _Checksums()
    sums.add(np.frombuffer(path.read_bytes(), np.uint8))
    expected = {"bytes": path.stat().st_size, "crc32c": sums.ended()}
    return {name: t.tolist() for name, t in read_tensors(str(path), expected).items()}


FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "torch": (torch_file, read_format("torch", "a.pt")),
    "torch, old": (legacy_file, read_format("torch", "a.pt")),
    "safetensors": (safetensors_file, read_format("safetensors", "a.safetensors")),
    "npy": (npy_files, read_format("npy")),
    "sok": (sok_files, read_format("sok")),
    "parquet": (parquet_file, read_format("parquet", "t.parquet")),
    "parquet, dumped": (dumped_parquet, read_format("parquet", "t.parquet")),
    "oneembedding": (oneembedding_files, read_format("oneembedding")),
    "config": (text("a.toml", CONFIG), read_config),
    "tables": (text("a.toml", TABLES), read_tables),
    "plan": (text("a.toml", PLAN), read_plan),
    "checkpoint": (saved_tensors, read_saved),
}
SEALED = {"parquet, dumped"}
"""Formats that tell every change."""


def tally_of(name: str, folder: Path, count: int) -> dict[str, int]:
    """How many damaged files of this format were read, and how many refused, in bounded memory."""
    make, read = FORMATS[name]
    make(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    good = {path: path.read_bytes() for path in files}
    expected = read(folder)
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    warnings.simplefilter("ignore")  # of torch and NumPy, about what they read
    chance = random.Random(name)
    tally = {"read": 0, "refused": 0}
    for number in range(count):
        path = chance.choice(files)
        bad = changed(good[path], chance)
        path.write_bytes(bad)
        try:
            found = read(folder)
            tally["read"] += 1
            if name in SEALED and bad != good[path]:
                assert found == expected, (number, path)
        except HotbedError as error:
            assert str(error), number
            tally["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"example {number}: {path} is {bad[:2000]!r}") from error
        path.write_bytes(good[path])
    return tally
