"""A file system of this machine, or one that is mounted on it.

Who writes a checkpoint holds an exclusive lock on its folder, who reads one a shared lock; a folder
without manifest that nobody holds was left by a process that died, and the next save removes it.
Who names a checkpoint, or completes one and removes earlier ones, holds an exclusive lock on the
folder of the run, so that names rise in the order in which checkpoints were completed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Sequence

from hotbed.checkpoint.entries import SizedFile
from hotbed.checkpoint.names import MANIFEST, NEXT, name_after, order_of
from hotbed.checkpoint.stores.local_files import (
    LocalFiles,
    held,
    made_to_stay,
    remove_own,
    sync_folder,
    write_new,
)
from hotbed.checkpoint.stores.protocol import NewFolder

__all__ = ["LOCAL", "LocalStore"]


class LocalStore(LocalFiles):
    """The file system of this machine."""

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

    def remove_unused(self, folder: str, unless: Callable[[], bool]) -> None:
        with contextlib.suppress(OSError), self._alone(folder) as there:
            if there:
                remove_own(folder)

    def remove_left_over(self, folder: str) -> None:
        with contextlib.suppress(OSError), self._alone(folder) as there:
            if there and not os.path.lexists(os.path.join(folder, MANIFEST)):
                remove_own(folder)

    def _alone(self, folder: str) -> contextlib.AbstractContextManager[bool]:
        return held(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


LOCAL = LocalStore()


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
