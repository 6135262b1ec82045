"""Folders of sok.dump, whose bytes are put together here."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from formats.format_tables import USERS, a_checkpoint, about, imported, refused, run, same
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb

INDEX = {"i4": 0, "i8": 1, "u4": 2, "u8": 3, "f2": 4, "f4": 5, "f8": 6}


def file_of(kind: int, array: np.ndarray, name: str = "", slot: str = "") -> bytes:
    """What `sok.dump` writes: a blank or right-adjusted name, kind, slot, type; numbers as they lie."""
    code = array.dtype.str[1:]
    head = name.rjust(256).encode() + struct.pack(">I", kind) + slot.rjust(32).encode()
    return head + struct.pack(">I", INDEX[code]) + array.tobytes()


def table(folder: Path, stem: str, keys: np.ndarray, weights: np.ndarray, name: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{stem}-key").write_bytes(file_of(0, keys, name))
    (folder / f"{stem}-weight").write_bytes(file_of(1, weights, name))
    return folder


@given(
    st.sampled_from(["i4", "i8", "u4", "u8"]),
    st.sampled_from(["f2", "f4", "f8"]),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 2**32),
)
def test_tables_of_any_types(
    tmp_path_factory: pytest.TempPathFactory, key: str, number: str, n: int, dim: int, seed: int
) -> None:
    from hotbed.formats.kinds.sok import Sok
    from hotbed.formats.tables import Hints

    random = np.random.default_rng(seed)
    limits = np.iinfo(key)
    keys = random.permutation(np.array([limits.min, limits.max, *range(1, 99)], key))[:n]
    weights = random.normal(size=(n, dim)).astype(number)
    folder = table(tmp_path_factory.mktemp("sok"), "Variable_0", keys, weights)
    assert Sok().is_in(str(folder))
    (found,) = Sok().read(str(folder), Hints()).tables
    assert (found.name, found.rows, found.stored, found.dim) == ("Variable_0", None, n, dim)
    ids, rows = (torch.cat(parts) for parts in zip(*found.chunks(), strict=True))
    assert ids.tolist() == keys.astype(np.int64).tolist()
    assert rows.numpy().tobytes() == weights.tobytes()


def test_ids_beyond_int64_keep_their_bits(tmp_path: Path) -> None:
    keys = np.array([2**63, 2**64 - 1, 0], "u8")
    table(tmp_path / "sok", "t", keys, np.eye(3, 2, dtype="f4"))
    ids, rows = imported(tmp_path / "sok", tmp_path / "run")["t"]
    assert ids.tolist() == [-(2**63), -1, 0]
    assert rows.tolist() == [[1, 0], [0, 1], [0, 0]]


def test_several_tables_with_states(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = random.normal(size=(4, 3)).astype("f4")
    folder = table(tmp_path / "sok", "user_0", np.arange(4) * 7, weights)
    table(folder, "item_0", np.arange(4, dtype="u8"), weights * 2, name="item:0")
    (folder / "user_0-Adam-m").write_bytes(file_of(2, weights, slot="m"))
    code, said = run("import", folder, "--to", tmp_path / "run")
    assert code == 0 and "user_0-Adam-m" in said and "an optimizer's state" in said
    assert [*about(tmp_path / "run")] == ["item:0", "user_0"]
    found = imported(
        folder, tmp_path / "one", "--table", "user_0", "--rename", "user_0=user.weight"
    )
    same(found, {"user.weight": (torch.arange(4) * 7, torch.from_numpy(weights))})


def test_a_dump_has_the_bytes_of_sok(tmp_path: Path) -> None:
    expected = a_checkpoint(tmp_path / "run")
    assert run("dump", tmp_path / "run", "--to", tmp_path / "sok", "--format", "sok")[0] == 0
    names = ["item_weight-key", "item_weight-weight", "user-key", "user-weight"]
    assert sorted(os.listdir(tmp_path / "sok")) == names
    items = expected["item.weight"][
        1
    ].numpy()  # by rising id, as sok.load of a static variable goes by place
    wrote = {name: (tmp_path / "sok" / name).read_bytes() for name in names}
    assert wrote["item_weight-key"] == file_of(0, np.arange(10), "item.weight")
    assert wrote["item_weight-weight"] == file_of(1, items, "item.weight")
    order = torch.tensor([3, 4, 5, 0, 1, 2])  # of the chunks
    assert wrote["user-key"] == file_of(0, USERS[order].numpy(), "user")
    assert wrote["user-weight"] == file_of(1, expected["user"][1][order].numpy(), "user")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_there_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = a_checkpoint(tmp_path / "run", dtype)
    assert run("dump", tmp_path / "run", "--to", tmp_path / "sok", "--format", "sok")[0] == 0
    if dtype == torch.bfloat16:
        expected = {name: (ids, weights.float()) for name, (ids, weights) in expected.items()}
    same(imported(tmp_path / "sok", tmp_path / "back"), expected)


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("t-weight", lambda raw: raw[:-1], "it is cut off"),
        ("t-weight", lambda raw: raw[:-4], "bytes after its header, which are no 6 rows"),
        ("t-weight", lambda raw: raw[:296], "t-weight has 0 columns"),
        ("t-key", lambda raw: raw[:-3], "which are no int64"),
        ("t-key", lambda raw: raw[:-8], "which are no 5 rows"),
        ("t-key", lambda raw: raw[:296], "which are no 0 rows"),
        ("t-key", lambda raw: raw[:100], "t-key does not begin as"),
        ("t-key", lambda raw: b"", "t-key does not begin as"),
        ("t-key", lambda raw: raw[:292] + b"\0\0\0\7" + raw[296:], "t-key does not begin as"),
        ("t-key", lambda raw: raw[:292] + b"\0\0\0\5" + raw[296:], "no integers in one dimension"),
        ("t-weight", lambda raw: raw[:292] + b"\0\0\0\1" + raw[296:], "t-weight is int64"),
        ("t-key", lambda raw: raw[:256] + b"\0\0\0\1" + raw[260:], "t-key does not begin as"),
        ("t-key", lambda raw: raw[:-8] + raw[-16:-8], "has the id 4 twice"),
        ("t-weight", None, "'t-key' and not the other file of 't'"),
        ("t-key", None, "'t-weight' and not the other file of 't'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, file: str, change: object, why: str) -> None:
    folder = table(tmp_path / "sok", "t", np.arange(6), np.ones((6, 6), "f4"))
    if change is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(change((folder / file).read_bytes()))
    said = refused("import", folder, "--format", "sok", "--to", tmp_path / "run")
    assert why in said and "/sok" in said
    assert [p.name for p in tmp_path.iterdir()] == ["sok"]


def test_a_static_table_reads_what_was_imported(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(8, 3)).astype("f4")
    keys = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # as two GPUs write those of a sok.Variable
    table(tmp_path / "sok", "user_0", keys, weights)
    imported(tmp_path / "sok", tmp_path / "run", "--rename", "user_0=weight")
    layer = hb.Embedding(8, 3)
    hb.load(tmp_path / "run", layer, strict=False)
    assert torch.equal(layer(torch.from_numpy(keys)), torch.from_numpy(weights))


def test_a_cut_that_leaves_rows_of_another_length(tmp_path: Path) -> None:
    """Nothing in the folder tells the length of a row."""
    folder = table(tmp_path / "sok", "t", np.arange(6), np.ones((6, 5), "f4"))
    (folder / "t-key").write_bytes(file_of(0, np.arange(5)))
    said = refused("import", folder, "--dim", 5, "--to", tmp_path / "run")
    assert "'t' has rows of 6 numbers, and not 5" in said
    assert [*imported(folder, tmp_path / "run", "--dim", 6)] == ["t"]


def test_names_that_would_be_one(tmp_path: Path) -> None:
    from hotbed.checkpoint import write

    rows = (torch.arange(2), torch.ones(2, 2))
    write(tmp_path / "run", {"a.b": [rows], "a:b": [rows], "c" * 300: [rows]})
    options = ("--to", tmp_path / "out", "--format", "sok")
    assert "would both be 'a_b' there" in refused("dump", tmp_path / "run", *options)
    long = ("--table", "c" * 300)
    assert "more than 256 bytes" in refused("dump", tmp_path / "run", *options, *long)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_table_without_rows_there_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    empty = torch.arange(0), torch.empty(0, 3).to(dtype)
    full = torch.arange(4), torch.randn(4, 3).to(dtype)
    hb.checkpoint.write(tmp_path / "run", {"empty": [empty], "full": [full]})
    assert run("dump", tmp_path / "run", "--to", tmp_path / "sok", "--format", "sok")[0] == 0
    found = imported(tmp_path / "sok", tmp_path / "back", "--dim", 3)
    same(found, {"empty": empty, "full": full})
    code, said = run("import", tmp_path / "sok", "--to", tmp_path / "some")
    assert code == 0 and "has no rows, and only --dim could tell how wide they would be" in said
    assert [*about(tmp_path / "some")] == ["full"]
    hb.checkpoint.write(tmp_path / "none", {"empty": [empty]})
    assert run("dump", tmp_path / "none", "--to", tmp_path / "e", "--format", "sok")[0] == 0
    said = refused("import", tmp_path / "e", "--to", tmp_path / "no")
    assert "has no table: 'empty' has no rows, and only --dim" in said
    for dim in (-5, 0, 2**40, 2**63, 10**30):
        said = refused("import", tmp_path / "e", "--to", tmp_path / "no", "--dim", dim)
        assert f"--dim is {dim}; a table has from 1 to 4,194,304 columns" in said
