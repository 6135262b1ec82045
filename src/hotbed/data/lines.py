"""Text files, plain or gzip, as blocks of whole lines."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator

from hotbed.errors import HotbedError
from hotbed.text import brief

BLOCK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


class DataError(HotbedError, ValueError):
    """A file cannot be read as what it should be; the message names file and line."""


def line_blocks(path: str, longest: int) -> Iterator[bytes]:
    """Yield the file's contents in blocks that end with a line feed (the last one may not).

    gzip files are known by their first bytes, not by their name. Of a line longer than `longest`
    bytes only the first `longest` + 1 are kept, so a file without line feeds needs no memory.

    Raises:
        DataError: the gzip stream is cut short or damaged.
    """
    rest = b""
    for piece in _pieces(path):
        cut = piece.rfind(b"\n") + 1
        if cut:
            yield rest + piece[:cut] if rest else piece[:cut]
            rest = piece[cut : cut + longest + 1]
        elif len(rest) <= longest:
            rest = (rest + piece)[: longest + 1]
    if rest:
        yield rest


def _pieces(path: str) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        head = file.read(BLOCK_BYTES)
        if len(head) == 1:  # of a pipe
            head += file.read(BLOCK_BYTES)
        if head[:2] == _GZIP_MAGIC:
            yield from _inflated(path, head, file.fileno())
            return
        while head:
            yield head
            head = file.read(BLOCK_BYTES)


def _inflated(path: str, data: bytes, descriptor: int) -> Iterator[bytes]:
    """The contents of all members of a gzip stream that starts with `data`."""
    while True:
        member = zlib.decompressobj(wbits=31)  # 31: gzip framing, checksum verified by zlib
        while not member.eof:
            if not data:
                data = os.read(descriptor, BLOCK_BYTES // 4)
            if not data:
                raise DataError(
                    f"{path}: the gzip stream ends too early; the file is cut short. "
                    "Fetch or write it again."
                )
            try:
                piece = member.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                raise DataError(
                    f"{path}: the gzip stream is damaged ({error}). Fetch or write it again."
                ) from None
            data = member.unconsumed_tail
            if piece:
                yield piece
        # Zero bytes may pad the end of a gzip file; anything else is the next member.
        data = member.unused_data.lstrip(b"\0")
        while not data:
            block = os.read(descriptor, BLOCK_BYTES // 4)
            if not block:
                return
            data = block.lstrip(b"\0")


_Path = str | bytes | os.PathLike[str]


def existing(paths: _Path | Iterable[_Path]) -> list[str]:
    """The names of one file, or of several; they are there.

    Raises:
        ValueError, IsADirectoryError, FileNotFoundError: no file is named, or what is named is none.
    """
    one: Iterable[_Path] = [paths] if isinstance(paths, str | bytes | os.PathLike) else paths
    try:
        names = [os.fsdecode(path) for path in one]
    except TypeError as error:
        raise TypeError(
            f"paths must be one path or several, got {brief(paths)}: {error}."
        ) from None
    if not names:
        raise ValueError("No click log was given: paths is empty.")
    for name in names:
        if os.path.isdir(name):
            raise IsADirectoryError(f"Click log {name!r} is a directory; pass the files in it.")
        if not os.path.exists(name):
            raise FileNotFoundError(f"Click log {name!r} does not exist.")
    return names
