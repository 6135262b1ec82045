"""Files of a saved model: what is written is read, and what is not what was written is told."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.saved_models import crc32c
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hotbed import _core
from hotbed.checkpoint import files as json_files
from hotbed.checkpoint import tensors as tensor_files
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.files import read_json_sealed, write_json_sealed
from hotbed.checkpoint.stores.local import LocalStore
from hotbed.checkpoint.stores.local_files import write_new_beside
from hotbed.checkpoint.tensors import header_of, read_tensors, write_tensors
from hotbed.errors import OutOfMemory

TENSORS = {
    "a": torch.arange(5, dtype=torch.uint8),
    "b/ä": torch.randn(3, 4),
    "scalar": torch.tensor(-7),
    "empty": torch.empty(0, 4_000_000),
    "half": torch.randn(2, 3).half(),
    "bfloat": torch.randn(7).bfloat16(),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "int": torch.tensor([1, -2], dtype=torch.int32),
    "transposed": torch.randn(3, 5).t(),
    "one of stride 0": torch.tensor(2.5).expand(1),
    "none of stride 0": torch.empty(1, 1).expand(1, 1)[:0].t(),
}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
def test_checksums_are_those_of_the_standard(data: bytes, cut: int) -> None:
    assert _core.crc32c(np.frombuffer(bytearray(data), np.uint8)) == crc32c(data)
    first, second = (np.array(bytearray(part), np.uint8) for part in (data[:cut], data[cut:]))
    assert _core.crc32c(second, _core.crc32c(first)) == crc32c(data)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_what_is_written_is_read_here_and_by_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", chunk)
    path = tmp_path / "x"
    written = write_tensors(str(path), TENSORS)
    data = path.read_bytes()
    assert written["bytes"] == len(data)
    pieces = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    assert written["crc32c"] == [f"{crc32c(piece):08x}" for piece in pieces]
    assert same(read_tensors(str(path), written), TENSORS)
    assert same(load_file(path), TENSORS)
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_each_tensor_lies_at_a_multiple_of_its_elements() -> None:
    for length in range(8):
        some = {"x" * length: torch.ones(3, dtype=torch.uint8), **TENSORS}
        _, begins = header_of({name: (t.dtype, t.shape) for name, t in some.items()})
        assert begins.keys() == some.keys()
        assert [name for name, at in begins.items() if at % some[name].itemsize] == []


def test_files_that_the_system_reads_and_writes_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does those of more than 2 GB."""

    class InParts(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:100])

        @property
        def size(self) -> int:
            return os.fstat(self.fileno()).st_size

    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:100]))
    written = write_tensors(str(tmp_path / "x"), TENSORS)
    write_json_sealed(str(tmp_path / "x.json"), {"text": "x" * 1000})
    monkeypatch.undo()
    assert same(load_file(tmp_path / "x"), TENSORS)
    assert read_json_sealed(str(tmp_path / "x.json"))[1]
    monkeypatch.setattr(LocalStore, "open_plain", staticmethod(InParts))
    assert same(read_tensors(str(tmp_path / "x"), written), TENSORS)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(str(tmp_path / "x"), TENSORS)
    with pytest.raises(FileExistsError):
        write_json_sealed(str(tmp_path / "x"), {})
    assert (tmp_path / "x").read_text() == "mine"


def test_every_flipped_bit_of_a_manifest_shows(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    contents = {"format": 2, "list": [1, "ä"]}
    write_json_sealed(str(path), contents)
    whole = path.read_bytes()
    assert json.loads(whole) == {**contents, "crc32c": json.loads(whole)["crc32c"]}
    assert read_json_sealed(str(path)) == (json.loads(whole), True)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert not read_json_sealed(str(path))[1]
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert not read_json_sealed(str(path))[1]
    path.write_bytes(whole + b"\n")
    assert not read_json_sealed(str(path))[1]


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_json_sealed(str(path), {"text": "x" * 100})
    monkeypatch.setattr(json_files, "_MOST_JSON", path.stat().st_size)
    assert read_json_sealed(str(path))[1]
    monkeypatch.setattr(json_files, "_MOST_JSON", path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"x.json is larger than 1\d\d bytes"):
        read_json_sealed(str(path))


def file_of(header: Any, data: bytes = b"", claimed: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HOSTILE = {
    "nothing": b"",
    "half a length": b"\0\0\0",
    "a header of 100 GB": file_of({}, claimed=100 * 10**9),
    "a header of 2**64 - 1 bytes": file_of({}, claimed=2**64 - 1),
    "a header cut short": file_of(entry(), claimed=3),
    "a header that is no JSON": file_of(b"{{}}"),
    "a header that is no text": file_of(b"\xff\xfe"),
    "a header that is a list": file_of([]),
    "a deep header": file_of(b"[" * 100_000),
    "an entry that is none": file_of({"x": 1}),
    "an entry without a shape": file_of({"x": {"dtype": "F32", "data_offsets": [0, 0]}}),
    "an unknown dtype": file_of(entry("F31"), bytes(4)),
    "a dtype that is a list": file_of(entry(["F32"]), bytes(4)),
    "bytes that are not there": file_of(entry(shape=[10**6], offsets=[0, 4 * 10**6]), bytes(4)),
    "100 GB of shape": file_of(entry(shape=[25 * 10**9]), bytes(4)),
    "fewer bytes than the shape": file_of(entry(shape=[2]), bytes(8)),
    "a shape beyond 64 bits": file_of(entry(shape=[2**40, 2**40]), bytes(4)),
    "nothing of a shape beyond 64 bits": file_of(entry(shape=[0, 2**40, 2**40], offsets=[0, 0])),
    "a negative shape": file_of(entry(shape=[-1, -1]), bytes(4)),
    "a shape of text": file_of(entry(shape=["1"]), bytes(4)),
    "a shape of fractions": file_of(entry(shape=[1.0]), bytes(4)),
    "offsets that go back": file_of(entry(offsets=[4, 0]), bytes(4)),
    "negative offsets": file_of(entry(offsets=[-4, 0]), bytes(4)),
    "three offsets": file_of(entry(offsets=[0, 2, 4]), bytes(4)),
    "offsets in fractions": file_of(entry(offsets=[0, 4.0]), bytes(4)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_an_error_that_names_it(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(HOSTILE[what])
    expected = {"bytes": len(HOSTILE[what]), "crc32c": [f"{crc32c(HOSTILE[what]):08x}"]}
    with pytest.raises(CheckpointError, match=f"{path} is no safetensors file"):
        read_tensors(str(path), expected)


@pytest.mark.parametrize(
    "expected",
    [None, {}, {"bytes": 8}, {"bytes": "8", "crc32c": []}, {"bytes": 8, "crc32c": {}}],
)
def test_what_to_expect_must_be_known(tmp_path: Path, expected: Any) -> None:
    with pytest.raises(CheckpointError, match="no size and checksums in the manifest"):
        read_tensors(str(tmp_path / "x"), expected)


def test_the_number_of_checksums_must_be_right(tmp_path: Path) -> None:
    written = write_tensors(str(tmp_path / "x"), TENSORS)
    for sums in ([], written["crc32c"] * 2, [None], [int(written["crc32c"][0], 16)]):
        with pytest.raises(CheckpointError, match="x (has . checksums|is damaged)"):
            read_tensors(str(tmp_path / "x"), {**written, "crc32c": sums})


def test_a_shape_of_many_entries_is_not_multiplied(tmp_path: Path) -> None:
    path = tmp_path / "x"
    about = {"dtype": "F32", "shape": [2**40] * 100_000, "data_offsets": [0, 4]}
    header = json.dumps({"a": about}).encode()
    raw = len(header).to_bytes(8, "little") + header + bytes(4)
    path.write_bytes(raw)
    sums = tensor_files._Checksums()
    sums.add(np.frombuffer(raw, np.uint8))
    with pytest.raises(CheckpointError, match="'a' is to have 100,000 dimensions"):
        read_tensors(str(path), {"bytes": len(raw), "crc32c": sums.ended()})


def test_a_file_without_memory_for_it_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse
    expected = {"bytes": 1 << 40, "crc32c": ["00000000"] * (1 << 16)}
    with pytest.raises(OutOfMemory, match="x has 1,099,511,627,776 bytes, and .* are free"):
        read_tensors(str(path), expected)


def test_nothing_is_read_behind_a_damaged_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 64)
    path = tmp_path / "x"
    expected = write_tensors(str(path), {"a": torch.arange(1000)})
    raw = bytearray(path.read_bytes())
    raw[64 * 3 + 5] ^= 1
    path.write_bytes(raw)
    memory = torch.full((len(raw),), 77, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="bytes 192 to 256 are not those"):
        tensor_files.read_views(str(path), expected, memory)
    assert memory[: 64 * 4].tolist() == list(raw[: 64 * 4])
    assert bool((memory[64 * 4 :] == 77).all())


BLOCKS = 4096 * 1024
"""Bytes that are written at once past the cache."""


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, BLOCKS - 1, BLOCKS, 2 * BLOCKS + 5])
def test_files_past_the_cache(
    tmp_path: Path, size: int, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the bytes of others, also where the file system knows no such way."""
    opened = os.open

    def refused(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            opened(path, flags & ~os.O_DIRECT, *more)  # it is made, and not written
            raise OSError(errno.EINVAL, "no direct access")
        return opened(path, flags, *more, **options)

    if not is_direct:
        monkeypatch.setattr(os, "open", refused)
    content = np.random.default_rng(size).bytes(size)
    pieces = [content[:3], b"", content[3:5000], memoryview(content)[5000:]]
    write_new_beside(str(tmp_path / "file"), pieces)
    assert (tmp_path / "file").read_bytes() == content
    with pytest.raises(FileExistsError):
        write_new_beside(str(tmp_path / "file"), pieces)
    assert (tmp_path / "file").read_bytes() == content
