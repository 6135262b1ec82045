"""JSON files that check themselves: the last entry is the CRC32C of all bytes before, in hexadecimal
digits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

import numpy as np

from hotbed import _core
from hotbed.checkpoint.errors import DamagedError
from hotbed.checkpoint.stores import store_of

__all__ = ["read_json_sealed", "sealed", "write_json_sealed"]


def write_json_sealed(path: str, contents: Mapping[str, object]) -> None:
    """Writes `contents`, with a checksum as their last entry, where no file is, to stay.

    Raises:
        OSError: nothing is there.
    """
    store = store_of(path)
    try:
        store.write_new(path, sealed(contents))
    except FileExistsError:
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            store.remove_file(path)
        raise


def read_json_sealed(path: str) -> tuple[object, bool]:
    """(contents, whether the checksum is there and right); contents are None where they are no JSON.

    Raises:
        DamagedError: it is missing, or no plain file, or larger than any.
    """
    with store_of(path).open_plain(path) as file:
        if file.size > _MOST_JSON:
            raise DamagedError(
                f"{path} is larger than {_MOST_JSON:,} bytes, so it is none of Hotbed's."
            )
        raw = bytearray(file.size)
        left = memoryview(raw)
        while left and (count := file.readinto(left)):
            left = left[count:]
    raw = raw[: len(raw) - len(left)]
    body = bytes(raw[:-_SEAL_BYTES])
    try:
        contents = json.loads(raw)
    except (ValueError, RecursionError):
        contents = None
    return contents, raw == body + _seal(body)


_MOST_JSON = 1 << 30
"""Bytes: the manifest of 100 TB has less."""

_SEAL = b'  "crc32c": "%08x"\n}\n'
_SEAL_BYTES = len(_SEAL % 0)


def sealed(contents: Mapping[str, object]) -> list[bytes]:
    """Return the pieces of such a file."""
    body = json.dumps(contents, indent=2).encode()[: -len("\n}")] + b",\n"
    return [body, _seal(body)]


def _seal(body: bytes) -> bytes:
    return _SEAL % _core.crc32c(np.array(bytearray(body), np.uint8))
