"""A file system of this machine, or one that is mounted on it.

Who writes a checkpoint holds an exclusive lock on its folder, who reads one a shared lock; a folder
without manifest that nobody holds was left by a process that died, and the next save removes it.
Who names a checkpoint, or completes one and removes earlier ones, holds an exclusive lock on the
folder of the run, so that names rise in the order in which checkpoints were completed.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat
from collections.abc import Callable, Iterable, Sequence

from hotbed.checkpoint.entries import SizedFile
from hotbed.checkpoint.names import MANIFEST, NEXT, name_after, order_of
from hotbed.checkpoint.stores.local_files import (
    held,
    made_to_stay,
    open_plain,
    remove_own,
    sync_folder,
    write_new,
    write_new_beside,
)
from hotbed.checkpoint.stores.protocol import NewFolder, Reader
from hotbed.files import new_beside

__all__ = ["LOCAL", "LocalStore"]


class LocalStore:
    """The file system of this machine."""

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

    def is_complete(self, folder: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(os.path.join(folder, MANIFEST)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def reading(self, folder: str) -> contextlib.AbstractContextManager[bool]:
        return held(folder, fcntl.LOCK_SH)

    def is_being_written(self, folder: str) -> bool:
        try:
            with held(folder, fcntl.LOCK_SH | fcntl.LOCK_NB):
                return False
        except BlockingIOError:
            return True

    def make_folder(self, path: str) -> bool:
        return made_to_stay(path)

    def remove_empty(self, folder: str) -> None:
        os.rmdir(folder)

    def alone_in(self, root: str) -> contextlib.AbstractContextManager[bool]:
        return held(os.path.realpath(root), fcntl.LOCK_EX)

    def new_folder(self, root: str, step: int) -> NewFolder:
        return _LockedFolder(root, step)

    def remove_unused(self, folder: str, *, unless_complete: bool = False) -> None:
        with (
            contextlib.suppress(OSError),
            held(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as there,
        ):
            if there and not (unless_complete and os.path.lexists(os.path.join(folder, MANIFEST))):
                remove_own(folder)


LOCAL = LocalStore()


class _Plain(io.FileIO):
    """A plain file, to read, unbuffered."""

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size


class _LockedFolder:
    """The folder of a new checkpoint, which this process holds by an exclusive lock."""

    def __init__(self, root: str, step: int) -> None:
        self._step = step
        self.path = os.path.join(root, name_after(os.listdir(root), step))
        os.mkdir(self.path)
        stack = contextlib.ExitStack()
        self.release: Callable[[], None] = stack.close
        try:
            self.is_there = stack.enter_context(held(self.path, fcntl.LOCK_EX))
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
            raise

    def prepare(self, manifest: Sequence[bytes], files: Iterable[SizedFile]) -> None:
        path = os.path.join(self.path, NEXT)
        try:
            write_new(path, manifest)
        except FileExistsError:
            raise
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        sync_folder(self.path)

    def publish(self, last: tuple[int, int]) -> None:
        if last > order_of(self.path):
            self._rename_behind_all()
        os.replace(os.path.join(self.path, NEXT), os.path.join(self.path, MANIFEST))
        sync_folder(self.path)
        sync_folder(os.path.dirname(self.path))

    def _rename_behind_all(self) -> None:
        root, before = os.path.split(self.path)
        while before == os.path.basename(self.path):
            path = os.path.join(root, name_after(os.listdir(root), self._step))
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)  # no other takes the name from here on
                os.rename(self.path, path)
                self.path = path

    def discard(self) -> None:
        remove_own(self.path)
