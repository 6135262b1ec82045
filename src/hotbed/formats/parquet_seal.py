"""The seal of a Parquet file: a checksum of all its bytes.

Checksums of pages, which Parquet has, leave out the pages' headers and the footer, where a changed byte can
change numbers, too. So 20 bytes stand between the last page and the footer, where readers of Parquet look
for nothing: ``hotbed 1``, the CRC32C of all other bytes (4 bytes, little-endian), ``\\0crc32c\\0``. A program
that writes the table anew leaves them out, so a table that somebody edits does not pass for a damaged one.
"""

from __future__ import annotations

import os
from typing import IO

import numpy as np

from hotbed import _core
from hotbed.formats.tables import FormatError

__all__ = ["refuse_other_bytes", "seal"]

_SEAL_BEGIN, _SEAL_END = b"hotbed 1", b"\0crc32c\0"
_SEAL_BYTES = len(_SEAL_BEGIN) + 4 + len(_SEAL_END)
_AT_ONCE = 1 << 24


def seal(path: str) -> None:
    """Adds the seal to a complete file.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size - 8)
        footer = int.from_bytes(file.read(4), "little") + 8
        file.seek(size - footer)
        last = file.read()
        file.seek(size - footer)
        file.write(b"\0" * _SEAL_BYTES + last)
        file.flush()
        at = size - footer
        file.seek(at)
        file.write(_sealed(_crc32c(path, at, size + _SEAL_BYTES)))


def refuse_other_bytes(path: str) -> None:
    """Raises FormatError where a file that Hotbed has written has other bytes than then."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        at = _seal_at(file, size)
        if at is None:
            return
        file.seek(at)
        if file.read(_SEAL_BYTES) != _sealed(_crc32c(path, at, size)):
            raise FormatError(
                f"{path} is damaged: its bytes are not those that were written. Copy or dump it again."
            )


def _seal_at(file: IO[bytes], size: int) -> int | None:
    """Where the seal begins, of which some bytes may be damaged; None: there is none."""
    if size < 12:
        return None
    file.seek(size - 8)
    at = size - 8 - int.from_bytes(file.read(4), "little") - _SEAL_BYTES
    if at < 4:
        return None
    file.seek(at)
    found = file.read(_SEAL_BYTES)
    return at if found.startswith(_SEAL_BEGIN) or found.endswith(_SEAL_END) else None


def _crc32c(path: str, at: int, size: int) -> int:
    """Return the CRC-32C of all bytes but those of the seal."""
    raw = np.memmap(path, np.uint8, "r")
    crc32c = 0
    for begin, end in ((0, at), (at + _SEAL_BYTES, size)):
        for piece in range(begin, end, _AT_ONCE):
            crc32c = _core.crc32c(raw[piece : min(piece + (_AT_ONCE), end)], crc32c)
    return crc32c


def _sealed(crc32c: int) -> bytes:
    return _SEAL_BEGIN + crc32c.to_bytes(4, "little") + _SEAL_END
