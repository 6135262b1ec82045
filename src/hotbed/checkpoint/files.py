"""The files of a checkpoint: plain files, which are never written over.

The last entry of a JSON file is the CRC32C of all bytes before, in hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hotbed import _core
from hotbed.errors import HotbedError


class CheckpointError(HotbedError, ValueError):
    """A checkpoint cannot be loaded or saved; the message names the file, table or value."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, damaged, or cannot be read.

    ``others`` are the checkpoints beside it that are whole as far as the sizes of their files tell, the
    latest first; ``fault`` is the message without them.
    """

    others: Sequence[str] | None = None
    fault = ""

    def name_others(self, others: Sequence[str], line: str = "hotbed.load({path!r}, ...)") -> None:
        """Add to the message which other checkpoints there are.

        Args:
            line: how one is loaded, by its ``{path}`` or ``{name}``.
        """
        self.fault = self.fault or str(self)
        self.others = others
        if not others:
            self.args = (f"{self.fault} No other checkpoint beside it is whole.",)
            return
        names = ", ".join(os.path.basename(path) for path in others[:_MOST_NAMED])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        how = line.format(path=others[0], name=os.path.basename(others[0]))
        self.args = (
            f"{self.fault} Whole checkpoints beside it, by their sizes: {names}{more}. Load one by {how}. "
            f"To read them in full: hotbed checkpoint verify --all {os.path.dirname(others[0])}",
        )


_MOST_NAMED = 3


@contextlib.contextmanager
def others_loaded_by(line: str) -> Iterator[None]:
    """For a ``with`` statement: errors about damaged checkpoints say so how to load others; see
    `DamagedError.name_others`."""
    try:
        yield
    except DamagedError as error:
        if error.others is not None:
            error.name_others(error.others, line)
        raise


# -- JSON files that check themselves ----------------------------------------------------------------


def write_json_sealed(path: str, contents: Mapping[str, object]) -> None:
    """Writes `contents`, with a checksum as their last entry, where no file is, to stay.

    Raises:
        OSError: nothing is there.
    """
    body = json.dumps(contents, indent=2).encode()[: -len("\n}")] + b",\n"
    try:
        write_new(path, [body, _seal(body)])
    except FileExistsError:
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def read_json_sealed(path: str) -> tuple[object, bool]:
    """(contents, whether the checksum is there and right); contents are None where they are no JSON.

    Raises:
        DamagedError: it is missing, or no plain file, or larger than any.
    """
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_JSON:
            raise DamagedError(
                f"{path} is larger than {_MOST_JSON:,} bytes, so it is none of Hotbed's."
            )
        raw = file.readall()
    body = raw[:-_SEAL_BYTES]
    try:
        contents = json.loads(raw)
    except (ValueError, RecursionError):
        contents = None
    return contents, raw == body + _seal(body)


_MOST_JSON = 1 << 30
"""Bytes: the manifest of 100 TB has less."""

_SEAL = b'  "crc32c": "%08x"\n}\n'
_SEAL_BYTES = len(_SEAL % 0)


def _seal(body: bytes) -> bytes:
    return _SEAL % _core.crc32c(np.array(bytearray(body), np.uint8))


# -- the file system ---------------------------------------------------------------------------------


def write_new(path: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes a file where none is, to stay: one piece after the other.

    Raises:
        OSError: a part of it may be there; nothing, if it is a FileExistsError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


def write_new_beside(path: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Does as `write_new`, past the system's cache where the file system can: that leaves more of the
    processors to those who work meanwhile.

    Raises:
        OSError: as `write_new`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise OSError(error.errno, error.strerror, path) from None
        with contextlib.suppress(FileNotFoundError):  # which some make, and then refuse to write
            os.unlink(path)
        write_new(path, pieces)
        return
    try:
        size = 0
        for memory, count in _blocks(pieces):
            size += count
            left = memory[: -(-count // _BLOCK) * _BLOCK].data
            while left:
                left = left[os.write(descriptor, left) :]
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


_BLOCK, _BLOCKS = 4096, 1024
"""Bytes of a block of a disk, and how many are written at once."""


def _blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[tuple[np.ndarray, int]]:
    """Yield pieces side by side in memory that begins with a page, which is used again, and the bytes that
    they take of it; zeros follow up to the end of a block."""
    memory: np.ndarray = np.frombuffer(mmap.mmap(-1, _BLOCK * _BLOCKS), np.uint8)
    at = 0
    for piece in pieces:
        left: np.ndarray = np.frombuffer(piece, np.uint8) if len(piece) else memory[:0]
        while len(left):
            some = left[: len(memory) - at]
            memory[at : at + len(some)] = some
            at, left = at + len(some), left[len(some) :]
            if at == len(memory):
                yield memory, at
                at = 0
    if at:
        memory[at : -(-at // _BLOCK) * _BLOCK] = 0
        yield memory, at


def open_plain(path: str) -> io.FileIO:
    """A plain file, to read, unbuffered.

    Raises:
        DamagedError: it is missing or cannot be read, or is a link, a folder, a pipe or a device.
    """
    try:
        # Without following a link, and without waiting for who writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing.") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError(f"{path} is a link. A checkpoint is plain files.") from None
        raise DamagedError(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path} is no plain file. A checkpoint is plain files.")
    return open(descriptor, "rb", buffering=0)


def sync_folder(path: str) -> None:
    """Lets names that were made or taken away in a folder survive the death of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
