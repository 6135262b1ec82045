"""The files of a checkpoint: plain files, each read once and checked on the way.

A checksum is a CRC32C in hexadecimal digits. A file of tensors has one for every 16 MiB of it, which its
manifest keeps; the last entry of a JSON file is that of all bytes before.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from hotbed import _core
from hotbed.errors import HotbedError

CHUNK_BYTES = 16 << 20


class CheckpointError(HotbedError, ValueError):
    """What was saved cannot be loaded, or not be saved; the message names the file, or what it is about."""


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
        CheckpointError: it is missing, or no plain file.
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
    from safetensors.torch import save  # not by `import hotbed`

    contents = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    with open(path, "xb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(contents), "crc32c": _checksums(contents)}


def read_tensors(path: str, expected: Any) -> dict[str, Tensor]:
    """The tensors of a file.

    Args:
        expected: what `write_tensors` returned, or what a manifest claims that to be.

    Raises:
        CheckpointError: the file is missing, no plain file, not what was written, or no safetensors
            file; no more memory was taken than twice its bytes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    contents = _checked_bytes(path, expected)
    try:
        return load(contents)
    # Beside its own errors, those of torch and Python at what the format allows and they do not.
    except (SafetensorError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:300].rstrip(".")
        raise CheckpointError(f"{path} is no safetensors file that can be read: {text}.") from None


def _checksums(contents: bytes) -> list[str]:
    whole = np.frombuffer(contents, np.uint8)
    chunks = (whole[at : at + CHUNK_BYTES] for at in range(0, max(len(whole), 1), CHUNK_BYTES))
    return [f"{_core.crc32c(chunk):08x}" for chunk in chunks]


def _checked_bytes(path: str, expected: Any) -> bytes:
    match expected:
        case {"bytes": int(size), "crc32c": list(sums)}:
            pass
        case _:
            raise CheckpointError(f"{path} has no size and checksums in the manifest.")
    with open_plain(path) as file:
        there = os.fstat(file.fileno()).st_size
        if there != size:
            raise CheckpointError(
                f"{path} has {there:,} bytes and was saved with {size:,}. Copy or save it again."
            )
        contents = file.read()
    found = _checksums(contents)
    if len(sums) != len(found):
        raise CheckpointError(f"{path} has {len(sums)} checksums for {size:,} bytes.")
    for number, (own, saved) in enumerate(zip(found, sums, strict=True)):
        if own != saved:
            begin, end = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, size)
            raise CheckpointError(
                f"{path} is damaged: bytes {begin:,} to {end:,} are not those that were saved. Copy or "
                "save it again."
            )
    return contents


# -- the file system ---------------------------------------------------------------------------------


def open_plain(path: str) -> BinaryIO:
    """A plain file, to read, unbuffered.

    Raises:
        CheckpointError: it is missing or cannot be read, or is a link, a folder, a pipe or a device.
    """
    try:
        # Without following a link, and without waiting for who writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{path} {why}. A checkpoint is plain files.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no plain file. A checkpoint is plain files.")
    return open(descriptor, "rb", buffering=0)


def sync_folder(path: str) -> None:
    """Lets names that were made or taken away in a folder survive the death of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
