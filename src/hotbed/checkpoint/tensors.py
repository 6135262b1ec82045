"""Files of tensors in the format of safetensors (github.com/huggingface/safetensors): eight bytes that say
how long a JSON header is, the header, and the tensors one after the other.

They are written and read here and not by that library, which copies what it writes twice and what it reads
once. A checksum is the CRC32C, in hexadecimal digits, of 16 MiB of a file; the manifest keeps them.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed import _core
from hotbed.checkpoint.entries import Written
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.stores import Reader, store_of
from hotbed.errors import OutOfMemory

__all__ = ["CHUNK_BYTES", "DTYPES", "header_of", "read_tensors", "read_views", "write_tensors"]

CHUNK_BYTES = 16 << 20
_MUCH = 1 << 30
"""Bytes; whether there is memory for less is not asked."""
_MOST_DIMS = 64
"""Most dimensions of a tensor, as in torch."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(
    path: str, tensors: Mapping[str, Tensor | Sequence[Tensor]], *, beside: bool = False
) -> Written:
    """Writes a file where none is, to stay. Returns what `read_views` asks for.

    Args:
        tensors: several under one name are its parts, which differ in their first dimension.
        beside: whether others work meanwhile, see `hotbed.checkpoint.stores.protocol.Store.write_new_beside`.

    Raises:
        CheckpointError: a tensor has a dtype that cannot be saved.
        OSError: a part of it may be there.
    """
    parts = {name: [t] if isinstance(t, Tensor) else list(t) for name, t in tensors.items()}
    shapes = {}
    for name, own in parts.items():
        shape = list(own[0].shape)
        if len(own) > 1:
            shape[0] = sum(len(part) for part in own)
        shapes[name] = own[0].dtype, shape
    first, begins = header_of(shapes)
    size = len(first) + sum(part.nbytes for own in parts.values() for part in own)
    sums = _Checksums()
    pieces = (_bytes_of(part) for name in begins for part in parts[name])
    store = store_of(path)
    write = store.write_new_beside if beside else store.write_new
    write(path, sums.of_all(_chain(first, pieces)))
    return {"bytes": size, "crc32c": sums.ended()}


def header_of(
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of such tensors, and where each begins in it, in the order of the file.

    Raises:
        CheckpointError: a dtype cannot be saved.
    """
    header: dict[str, dict[str, object]] = {}
    begins: dict[str, int] = {}
    at = 0
    # By falling size of elements, so that each lies at a multiple of it.
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} has the dtype {dtype}, which a checkpoint cannot hold.")
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        begins[name], at = at, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + begin for name, begin in begins.items()}


def _chain(first: bytes, pieces: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    yield np.frombuffer(first, np.uint8)
    yield from pieces


def _bytes_of(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    if len(flat) < 2:  # torch takes such a one for contiguous whatever its stride
        flat = flat.new_empty(len(flat)).copy_(flat)
    plain: np.ndarray = flat.view(torch.uint8).numpy()
    return plain


def read_tensors(path: str, expected: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a file, each with memory of its own; else as `read_views`."""
    return {name: view.clone() for name, view in read_views(path, expected).items()}


def read_views(
    path: str,
    expected: Mapping[str, object],
    into: Tensor | None = None,
    only: Collection[str] | None = None,
    rest_if: Callable[[Mapping[str, Tensor]], bool] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a file, which lie together as they do in it.

    Args:
        expected: what `write_tensors` returned, or what a manifest claims that to be.
        into: (n,) uint8: memory for them, if it is large enough.
        only: names of those that are wanted, where they are there; of others nothing is read but what shares
            a chunk with them. None: all.
        rest_if: whether all are wanted, those being these; else all are returned, without rows.

    Raises:
        DamagedError: the file is missing, no plain file, not what was written, or no safetensors
            file; no more memory was taken than it has bytes.
        OutOfMemory: it has no room.
    """
    match expected:
        case {"bytes": int(size), "crc32c": list(sums)}:
            pass
        case _:
            raise DamagedError(f"{path} has no size and checksums in the manifest.")
    with store_of(path).open_plain(path) as file:
        checked = _Checked(path, file, size, sums, into)
        contents = checked.contents
        checked.read(0, 8 if only is not None else len(contents))
        if only is not None:
            checked.read(8, 8 + _header_bytes(contents))
        with _as_damaged(path):
            found = dict(_places_in(contents))
        wanted = {n: place for n, place in found.items() if only is None or n in only}
        for place in wanted.values():
            checked.read(place.begin, place.end)
        if rest_if is not None:
            with _as_damaged(path):
                first = {name: place.view(contents) for name, place in wanted.items()}
            if not rest_if(first):
                return {name: place.without_rows() for name, place in found.items()}
            checked.read(0, len(contents))
            wanted = found
    with _as_damaged(path):
        return {name: place.view(contents) for name, place in wanted.items()}


@contextlib.contextmanager
def _as_damaged(path: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:300].rstrip(".")
        raise DamagedError(f"{path} is no safetensors file that can be read: {text}.") from None


class _Place(NamedTuple):
    """Where a tensor lies in a file."""

    kind: torch.dtype
    shape: Sequence[int]
    begin: int
    end: int

    def view(self, contents: Tensor) -> Tensor:
        plain = contents[self.begin : self.end]
        if not len(plain):
            return torch.empty(self.shape, dtype=self.kind, device="cpu")
        aligned = plain if self.begin % self.kind.itemsize == 0 else plain.clone()
        return aligned.view(self.kind).reshape(self.shape)

    def without_rows(self) -> Tensor:
        return torch.empty((0, *self.shape[1:]), dtype=self.kind, device="cpu")


def _header_bytes(contents: Tensor) -> int:
    return int.from_bytes(bytes(contents[:8].tolist()), "little")


def _places_in(contents: Tensor) -> Iterable[tuple[str, _Place]]:
    """Yield the names of tensors in a file, of which the header is there, in the order of the file."""
    size = _header_bytes(contents)
    begin = 8 + size
    if begin > len(contents):
        raise ValueError(f"its header is to have {size:,} bytes")
    header = json.loads(contents[8:begin].numpy().tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    at = begin
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(end)]}:
                pass
            case _:
                raise ValueError(f"what its header says of {name!r} is incomplete")
        if len(shape) > _MOST_DIMS:
            raise ValueError(f"{name!r} is to have {len(shape):,} dimensions")
        if not all(type(width) is int and 0 <= width < 1 << 48 for width in shape):
            raise ValueError(f"{name!r} is to have the shape {shape}")
        kind = DTYPES[dtype]
        # One after the other, with nothing in between: so all of them lie in the file.
        if begin + first != at or end - first != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{name!r} is to lie at bytes {first:,} to {end:,}")
        at = begin + end
        if at > len(contents):
            raise ValueError(f"{name!r} is to end behind the file")
        yield name, _Place(kind, shape, begin + first, at)
    if at != len(contents):
        raise ValueError(f"{len(contents) - at:,} bytes are no tensor's")


class _Checksums:
    """Checksums of pieces that follow each other."""

    def __init__(self) -> None:
        self._sums: list[str] = []
        self._sum = self._bytes = 0

    def add(self, piece: np.ndarray) -> None:
        while len(piece):
            own, piece = piece[: CHUNK_BYTES - self._bytes], piece[CHUNK_BYTES - self._bytes :]
            self._sum = _core.crc32c(own, self._sum)
            self._bytes += len(own)
            if self._bytes == CHUNK_BYTES:
                self._sums.append(f"{self._sum:08x}")
                self._sum = self._bytes = 0

    def of_all(self, pieces: Iterable[np.ndarray]) -> Iterable[memoryview]:
        for piece in pieces:
            self.add(piece)
            yield piece.data

    def ended(self) -> list[str]:
        """Return the checksum of each chunk."""
        return [*self._sums, f"{self._sum:08x}"] if self._bytes or not self._sums else self._sums


class _Checked:
    """A file on its way into memory: a chunk is checked when it is read, once.

    Attributes:
        contents: (bytes of the file,) uint8, of which the chunks that were read are there.
    """

    def __init__(
        self, path: str, file: Reader, size: int, sums: Sequence[str], into: Tensor | None
    ) -> None:
        there = file.size
        if there != size:
            raise DamagedError(
                f"{path} has {there:,} bytes and was saved with {size:,}. Copy or save it again."
            )
        if len(sums) != max(1, -(-size // CHUNK_BYTES)):
            raise DamagedError(f"{path} has {len(sums)} checksums for {size:,} bytes.")
        large = into is not None and len(into) >= size
        self.contents = into[:size] if large and into is not None else _room_for(path, size)
        self._path, self._file, self._sums = path, file, sums
        self._left = {*range(len(sums))}
        self._at = 0

    def read(self, begin: int, end: int) -> None:
        """Read the chunks that have these bytes, as far as the file has them.

        Raises:
            DamagedError: they are not those that were saved.
        """
        last = max(begin, min(end, len(self.contents)) - 1) // CHUNK_BYTES
        for number in range(begin // CHUNK_BYTES, last + 1):
            if number in self._left:
                self._read_chunk(number)

    def _read_chunk(self, number: int) -> None:
        begin, end = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, len(self.contents))
        chunk = self.contents[begin:end].numpy()
        if begin != self._at:
            self._file.seek(begin)
        left = chunk.data
        while left and (count := self._file.readinto(left)):
            left = left[count:]
        # One by one, so that what is damaged, or no file at all but its size, takes no more memory.
        if left or f"{_core.crc32c(chunk, 0):08x}" != self._sums[number]:
            raise DamagedError(
                f"{self._path} is damaged: bytes {begin:,} to {end:,} are not those that were saved. Copy or "
                "save it again."
            )
        self._left.discard(number)
        self._at = end


def _room_for(path: str, size: int) -> Tensor:
    if size > _MUCH and size > (free := _core.available_memory()):
        raise OutOfMemory(f"{path} has {size:,} bytes, and {free:,} of memory are free.")
    return torch.empty(size, dtype=torch.uint8, device="cpu")
