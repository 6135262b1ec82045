"""The files of a saved model: plain files, each read once and checked on the way.

A checksum is a CRC32C in hexadecimal digits. A file of tensors has one for every 16 MiB of it, which its
manifest keeps; the last entry of a JSON file is that of all bytes before.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import HotbedError

CHUNK_BYTES = 16 << 20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class SavedModelError(HotbedError, ValueError):
    """A folder does not hold a model that can be loaded; the message names the file."""


# -- JSON files that check themselves ----------------------------------------------------------------


def write_json_sealed(path: str, contents: Mapping[str, Any]) -> None:
    """Writes `contents`, with a checksum as their last entry, where no file is, to stay.

    Raises:
        OSError: nothing is there.
    """
    body = json.dumps(contents, indent=2).encode()[: -len("\n}")] + b",\n"
    with open(path, "xb") as file:
        try:
            file.write(body + _seal(body))
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(path)
            raise


def read_json_sealed(path: str) -> tuple[Any, bool]:
    """(contents, whether the checksum is there and right); contents are None where they are no JSON.

    Raises:
        SavedModelError: it is missing, or no plain file.
    """
    with open_plain(path) as file:
        raw = file.read()
    body = raw[:-_SEAL_BYTES]
    try:
        contents = json.loads(raw)
    except (ValueError, RecursionError):
        contents = None
    return contents, raw == body + _seal(body)


_SEAL = b'  "crc32c": "%08x"\n}\n'
_SEAL_BYTES = len(_SEAL % 0)


def _seal(body: bytes) -> bytes:
    return _SEAL % _core.crc32c(np.array(bytearray(body), np.uint8))


# -- files of tensors --------------------------------------------------------------------------------


def write_tensors(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes a safetensors file where none is, to stay. Returns what `read_tensors` asks for.

    Raises:
        OSError: a part of it may be there.
    """
    # Wider elements first, so that all are aligned.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    sums = [0]
    room = CHUNK_BYTES
    with open(path, "xb") as file:
        for piece in (head, *(_bytes_of(tensors[name]) for name in names)):
            at = 0
            while at < len(piece):
                if not room:
                    sums.append(0)
                    room = CHUNK_BYTES
                chunk = piece[at : at + room]
                file.write(chunk.data)
                sums[-1] = _core.crc32c(chunk, sums[-1])
                at += len(chunk)
                room -= len(chunk)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"bytes": size, "crc32c": [f"{value:08x}" for value in sums]}


def _bytes_of(tensor: Tensor) -> Bytes:
    flat: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def read_tensors(path: str, expected: Any) -> dict[str, Tensor]:
    """The tensors of a file, which share its bytes in memory.

    Args:
        expected: what `write_tensors` returned, or what a manifest claims that to be.

    Raises:
        SavedModelError: the file is missing, no plain file, not what was written, or no safetensors
            file; no more memory was taken than it has bytes.
    """
    return _tensors_in(path, _checked_bytes(path, expected))


def _checked_bytes(path: str, expected: Any) -> Bytes:
    match expected:
        case {"bytes": int(size), "crc32c": list(sums)}:
            pass
        case _:
            raise SavedModelError(f"{path} has no size and checksums in the manifest.")
    with open_plain(path) as file:
        there = os.fstat(file.fileno()).st_size
        if there != size:
            raise SavedModelError(
                f"{path} has {there:,} bytes and was saved with {size:,}. Copy or save it again."
            )
        if len(sums) != max(1, math.ceil(size / CHUNK_BYTES)):
            raise SavedModelError(f"{path} has {len(sums)} checksums for {size:,} bytes.")
        contents = np.empty(size, np.uint8)
        for number, at in enumerate(range(0, max(size, 1), CHUNK_BYTES)):
            chunk = contents[at : at + CHUNK_BYTES]
            if not _filled(file, chunk) or f"{_core.crc32c(chunk):08x}" != sums[number]:
                raise SavedModelError(
                    f"{path} is damaged: bytes {at:,} to {at + len(chunk):,} are not those that "
                    "were saved. Copy or save it again."
                )
    return contents


def _filled(file: BinaryIO, chunk: Bytes) -> bool:
    at = 0
    while at < len(chunk):
        read = file.readinto(chunk.data[at:])  # type: ignore[attr-defined]
        if not read:
            return False
        at += read
    return True


def _tensors_in(path: str, contents: Bytes) -> dict[str, Tensor]:
    """As the safetensors project describes its format; metadata are passed over."""
    fault = SavedModelError(f"{path} is no safetensors file: its header does not fit its bytes.")
    begin = 8 + int.from_bytes(contents[:8].tobytes(), "little")
    if begin > len(contents):
        raise fault
    try:
        header = json.loads(contents[8:begin].tobytes())
    except (ValueError, RecursionError):
        raise fault from None
    if not isinstance(header, dict):
        raise fault
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        tensor = _tensor(entry, contents, begin)
        if tensor is None:
            raise SavedModelError(f"{path}: the tensor {name!r} does not fit the file's bytes.")
        tensors[name] = tensor
    return tensors


def _tensor(entry: Any, contents: Bytes, start: int) -> Tensor | None:
    match entry:
        case {"dtype": str(name), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            return None
    dtype = _DTYPES.get(name)
    if dtype is None or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        return None
    if len(shape) > 4 or not 0 <= begin <= end <= len(contents) - start:
        return None
    count = math.prod(shape)
    if end - begin != count * dtype.itemsize:
        return None
    if count == 0:
        # The strides of such a tensor have no bytes that would bound them.
        fits = math.prod(n or 1 for n in shape) < 2**62
        return torch.empty(shape, dtype=dtype) if fits else None
    return torch.frombuffer(contents, dtype=dtype, count=count, offset=start + begin).reshape(shape)


# -- the file system ---------------------------------------------------------------------------------


def open_plain(path: str) -> BinaryIO:
    """A plain file, to read, unbuffered.

    Raises:
        SavedModelError: it is missing or cannot be read, or is a link, a folder, a pipe or a device.
    """
    try:
        # Without following a link, and without waiting for who writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SavedModelError(f"{path} is missing.") from None
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise SavedModelError(f"{path} {why}. A saved model is plain files.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SavedModelError(f"{path} is no plain file. A saved model is plain files.")
    return open(descriptor, "rb", buffering=0)


def sync_folder(path: str) -> None:
    """Lets names that were made or taken away in a folder survive the death of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
