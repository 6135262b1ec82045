"""Files and folders of this machine: written to stay, and locked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import stat
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from hotbed.checkpoint.entries import SizedFile
from hotbed.checkpoint.errors import DamagedError
from hotbed.checkpoint.names import FILE_OF_LOG, LOG, MANIFEST, OWN
from hotbed.checkpoint.stores.protocol import Reader
from hotbed.files import new_beside

__all__ = [
    "LocalFiles",
    "held",
    "made_to_stay",
    "open_plain",
    "remove_others",
    "remove_own",
    "sync_folder",
    "write_new",
    "write_new_beside",
]


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


def open_plain(path: str) -> int:
    """Open a plain file to read. Returns its descriptor.

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
    return descriptor


def sync_folder(path: str) -> None:
    """Lets names that were made or taken away in a folder survive the death of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def made_to_stay(path: str) -> bool:
    """Makes a folder and those above it that are missing. Whether it was not there.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.isdir(path):
        return False
    above = os.path.dirname(path)
    made_to_stay(above)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):  # else somebody made it just now
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    sync_folder(above)
    return True


@contextlib.contextmanager
def held(folder: str, how: int) -> Iterator[bool]:
    """Keeps others from removing it: whether it was still there by then.

    Raises:
        BlockingIOError: somebody else holds it, and `how` says not to wait.
        FileNotFoundError: it is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            raise
        except OSError:  # not every file system can
            if how & fcntl.LOCK_NB:
                raise BlockingIOError from None
        try:
            there = os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except FileNotFoundError:
            there = False
        yield there
    finally:
        with contextlib.suppress(OSError):  # a child that was forked meanwhile has it, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):  # nothing was written to it
            os.close(descriptor)


def remove_own(folder: str) -> None:
    """Remove what is Hotbed's in it, the manifest first, and the folder if nothing else is there."""
    manifest = os.path.join(folder, MANIFEST)
    if os.path.lexists(manifest) and not os.path.isdir(manifest):
        os.unlink(manifest)
        sync_folder(folder)
    remove_others(folder, ())
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def remove_others(folder: str, names: Collection[str]) -> None:
    """Remove what is Hotbed's in the folder of a checkpoint, but for its manifest and the files and folders
    with these names."""
    for name in sorted({*os.listdir(folder)} - {MANIFEST, *names}):
        path = os.path.join(folder, name)
        if LOG.fullmatch(name) and os.path.isdir(path) and not os.path.islink(path):
            _remove_log(path)
        elif OWN.fullmatch(name) and not os.path.isdir(path):
            os.unlink(path)


def _remove_log(folder: str) -> None:
    for name in os.listdir(folder):
        if FILE_OF_LOG.fullmatch(name):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        os.rmdir(folder)


class LocalFiles:
    """Files and folders of this machine."""

    def absolute(self, path: str) -> str:
        return os.path.abspath(path)

    def resolved(self, path: str) -> str:
        return os.path.realpath(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def is_file(self, path: str) -> bool:
        return os.path.exists(path) and not os.path.isdir(path)

    def is_there(self, path: str) -> bool:
        return os.path.lexists(path)

    def names_in(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def folders_in(self, folder: str) -> list[str]:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def changed_at(self, path: str) -> float:
        return os.lstat(path).st_mtime

    def free_bytes(self, path: str) -> int | None:
        there = os.path.abspath(path)
        while not os.path.isdir(there):
            there = os.path.dirname(there)
        disk = os.statvfs(there)
        return disk.f_bavail * disk.f_frsize

    def try_writing(self, folder: str) -> None:
        if os.path.exists(folder):
            os.unlink(new_beside(os.path.join(folder, "model")))
        else:
            made_to_stay(os.path.abspath(folder))
            os.rmdir(folder)

    def write_new(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        write_new(path, pieces)

    def write_new_beside(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        write_new_beside(path, pieces)

    def open_plain(self, path: str) -> Reader:
        return _Plain(open_plain(path), "rb")

    def remove_file(self, path: str) -> None:
        os.unlink(path)

    def sizes_in(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # it was removed just now
                found[name] = os.lstat(os.path.join(folder, name)).st_size
        return found

    def fault_of_files(self, folder: str, files: Iterable[SizedFile]) -> str:
        for file in files:
            path = os.path.join(folder, file["name"])
            if os.path.dirname(file["name"]) and os.path.islink(os.path.dirname(path)):
                return f"{os.path.dirname(path)} is a link. A checkpoint is plain files."
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                return f"{path} is missing."
            except OSError as error:
                return f"{path} cannot be read: {error.strerror}."
            if not stat.S_ISREG(found.st_mode):
                what = "a link" if stat.S_ISLNK(found.st_mode) else "no plain file"
                return f"{path} is {what}. A checkpoint is plain files."
            if found.st_size != file["bytes"]:
                return (
                    f"{path} has {found.st_size:,} bytes and was saved with {file['bytes']:,}. Copy or save "
                    "it again."
                )
        return ""

    def refuse_links(self, what: str, remedy: str) -> None:
        """Do nothing: whether both ends share a file system is found when files are linked."""


class _Plain(io.FileIO):
    """A plain file, to read, unbuffered."""

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size
