"""Object storage that fsspec knows: ``s3://``, ``gs://``, ``memory://`` and others.

An object is written once, as a whole: nothing is appended, renamed or linked. There are no locks, but leases
(see `hotbed.checkpoint.stores.leases`), for which listings must show what was written before, as those of S3
and GCS do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from hotbed.checkpoint.entries import SizedFile
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.names import MANIFEST, OWN, name_after, order_of
from hotbed.checkpoint.stores import leases
from hotbed.checkpoint.stores.leases import LEASE, READING, REMOVING, WRITING, Lease
from hotbed.checkpoint.stores.objects import PIECE_BYTES, Entry, Objects
from hotbed.checkpoint.stores.protocol import NewFolder, Reader

__all__ = ["RemoteStore"]

_ABANDONED = 86400.0
"""Seconds since the last write into a folder without manifest and leases, after which its writer is dead."""
_MAY_NOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST_PAUSE = 0.2
"""Seconds, after two writers have wanted one name."""


class RemoteStore:
    """A storage of objects."""

    def __init__(self, url: str) -> None:
        """`url`: of anything in it."""
        self._objects = Objects(url)

    # -- paths

    def absolute(self, path: str) -> str:
        return self._objects.spelled(path)

    def resolved(self, path: str) -> str:
        return self._objects.spelled(path)

    def is_folder(self, path: str) -> bool:
        return (found := self._entry(path)) is not None and found.is_folder

    def is_file(self, path: str) -> bool:
        return (found := self._entry(path)) is not None and not found.is_folder

    def is_there(self, path: str) -> bool:
        return self._entry(path) is not None

    def _entry(self, path: str) -> Entry | None:
        try:
            return self._objects.entry(path)
        except FileNotFoundError:
            return None

    def names_in(self, folder: str) -> list[str]:
        return [entry.name for entry in self._objects.entries(folder)]

    def folders_in(self, folder: str) -> list[str]:
        return [entry.name for entry in self._objects.entries(folder) if entry.is_folder]

    def changed_at(self, path: str) -> float:
        found = self._objects.entry(path)
        if not found.is_folder:
            return found.changed
        times = [e.changed for e in self._objects.entries(path) if not e.is_folder]
        if not times:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return max(times)

    def free_bytes(self, path: str) -> int | None:
        return None

    def try_writing(self, folder: str) -> None:
        path = f"{folder}/{WRITING}-{secrets.token_hex(16)}"
        self._objects.put(path, b"")
        self._objects.remove(path)

    # -- files

    def write_new(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        self._objects.put_new(path, pieces)

    def write_new_beside(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        self._objects.put_new(path, pieces)

    def open_plain(self, path: str) -> Reader:
        if (found := self._entry(path)) is None:
            raise DamagedError(f"{path} is missing.")
        if found.is_folder:
            raise DamagedError(f"{path} is no plain file. A checkpoint is plain files.")
        return _Ranges(self._objects, path, found.size)

    def remove_file(self, path: str) -> None:
        self._objects.remove(path)

    def sizes_in(self, folder: str) -> dict[str, int]:
        return {e.name: e.size for e in self._objects.entries(folder) if not e.is_folder}

    def fault_of_files(self, folder: str, files: Iterable[SizedFile]) -> str:
        try:
            there = self.sizes_in(folder)
        except FileNotFoundError:
            there = {}
        for file in files:
            path, size = os.path.join(folder, file["name"]), there.get(file["name"])
            if size is None:
                return f"{path} is missing."
            if size != file["bytes"]:
                return (
                    f"{path} has {size:,} bytes and was saved with {file['bytes']:,}. Copy or save it "
                    "again."
                )
        return ""

    def refuse_links(self, what: str, remedy: str) -> None:
        raise CheckpointError(f"{what}, which object storage does not have. {remedy}")

    # -- checkpoints

    def is_complete(self, folder: str) -> bool:
        try:
            names = self.names_in(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return MANIFEST in names and not any(leases.is_of(REMOVING, name) for name in names)

    @contextlib.contextmanager
    def reading(self, folder: str) -> Iterator[bool]:
        lease = Lease(self._objects, folder, READING)
        try:
            try:
                lease.take()
            except OSError as error:
                if error.errno not in _MAY_NOT_WRITE:  # who may only read does so without one
                    raise
            # Whoever removes it looks for leases after its own is there, so one of both sees the other's.
            yield self.is_complete(folder)
        finally:
            lease.release()
            self._objects.remove_empty(folder)

    def is_being_written(self, folder: str) -> bool:
        return self._is_leased(folder, self.names_in(folder), WRITING)

    def _is_leased(self, folder: str, names: Iterable[str], *kinds: str) -> bool:
        """Return True if somebody has a lease of these kinds that has not run out."""
        return any(
            leases.is_of(kind, name) and not leases.has_run_out(self._objects, folder, name)
            for name in names
            for kind in kinds
        )

    def make_folder(self, path: str) -> bool:
        """Do nothing: a folder is there where objects are."""
        return False

    def remove_empty(self, folder: str) -> None:
        self._objects.remove_empty(folder)

    def alone_in(self, root: str) -> contextlib.AbstractContextManager[None]:
        """Do nothing: whoever names or completes a checkpoint finds out whether another does."""
        return contextlib.nullcontext()

    def new_folder(self, root: str, step: int) -> NewFolder:
        return _LeasedFolder(self, self._objects, root, step)

    def remove_unused(self, folder: str, *, unless_complete: bool = False) -> None:
        with contextlib.suppress(OSError):
            if unless_complete:
                if self._is_abandoned(folder):
                    self.remove_own(folder)
                return
            if self._is_leased(folder, self.names_in(folder), READING):
                return
            mark = Lease(self._objects, folder, REMOVING)
            try:
                mark.take()
                if not self._is_leased(folder, self.names_in(folder), READING):
                    self.remove_own(folder, last=mark.name)
            finally:
                mark.release()
                self._objects.remove_empty(folder)

    def _is_abandoned(self, folder: str) -> bool:
        """Return True if what is there of a checkpoint was left by a process that is certainly dead."""
        found = self._objects.entries(folder)
        names = [entry.name for entry in found]
        if MANIFEST in names and not any(leases.is_of(REMOVING, name) for name in names):
            return False
        if any(LEASE.fullmatch(name) for name in names):
            return not self._is_leased(folder, names, READING, WRITING, REMOVING)
        return max((e.changed for e in found), default=0.0) + _ABANDONED < leases.now()

    def remove_own(self, folder: str, last: str = "") -> None:
        """Remove what is Hotbed's in a folder, the manifest first.

        Args:
            last: a lease that stays.

        Raises:
            OSError: some of it is left.
        """
        names = self.names_in(folder)
        files = [name for name in names if OWN.fullmatch(name)]
        own_leases = [name for name in names if LEASE.fullmatch(name) and name != last]
        for name in sorted(files, key=lambda name: name != MANIFEST) + own_leases:
            with contextlib.suppress(FileNotFoundError):  # another does so, too
                self._objects.remove(os.path.join(folder, name))
        self._objects.remove_empty(folder)


class _Ranges:
    """An object that is read by ranges."""

    def __init__(self, objects: Objects, path: str, size: int) -> None:
        self._objects, self._path, self._at = objects, path, 0
        self.size = size

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing: nothing is open between two requests."""

    def seek(self, offset: int, /) -> int:
        self._at = offset
        return offset

    def readinto(self, buffer: memoryview, /) -> int | None:
        end = min(self._at + min(len(buffer), PIECE_BYTES), self.size)
        if end <= self._at:
            return 0
        try:
            found = self._objects.contents(self._path, self._at, end)
        except FileNotFoundError:
            raise DamagedError(f"{self._path} is missing.") from None
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


class _LeasedFolder:
    """The folder of a new checkpoint, which this process has a lease to write.

    The lease is the first object in it: who finds another's there takes back its own and tries the next name,
    so two writers never share one.
    """

    def __init__(self, store: RemoteStore, objects: Objects, root: str, step: int) -> None:
        try:
            names = store.folders_in(root)
        except FileNotFoundError:
            names = []
        self._store, self.is_there = store, True
        self.path = os.path.join(root, name_after(names, step))
        self._manifest = b""
        self._lease = Lease(objects, self.path, WRITING)
        self._objects = objects
        try:
            self._lease.take()
            found = store.names_in(self.path)
        except BaseException as error:
            self._lease.release()
            if isinstance(error, FileNotFoundError):
                raise CheckpointError(f"There is no bucket for {root}. Make it first.") from None
            raise
        if found == [self._lease.name]:
            return
        self._lease.release()
        if self._lease.name not in found:
            raise CheckpointError(
                f"{root} does not list what was just written there. Checkpoints need a storage that does."
            )
        time.sleep(_LONGEST_PAUSE * secrets.randbelow(1000) / 1000)  # or both try again and again
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)

    def prepare(self, manifest: Sequence[bytes], files: Iterable[SizedFile]) -> None:
        if fault := self._store.fault_of_files(self.path, files):
            self._refuse_lost()
            raise CheckpointError(f"It was not written as it should: {fault}")
        self._manifest = b"".join(manifest)

    def publish(self, last: tuple[int, int]) -> None:
        self._refuse_lost()
        if last > order_of(self.path):
            raise CheckpointError(
                f"Another process has completed a later checkpoint beside {self.path} while this one was "
                "written, which would not be the latest. Give each run a folder of its own."
            )
        self._objects.put(os.path.join(self.path, MANIFEST), self._manifest)

    def _refuse_lost(self) -> None:
        """Raise CheckpointError where others may have removed the folder, or write to it."""
        names = self._names()
        if self._lease.is_lost or not self._is_sole_writer(names) or MANIFEST in names:
            raise CheckpointError(
                f"{self.path}: the lease of this save has run out, and others may have taken it for dead. "
                "Save again."
            )

    def _names(self) -> list[str]:
        try:
            return self._store.names_in(self.path)
        except FileNotFoundError:
            return []

    def _is_sole_writer(self, names: Iterable[str]) -> bool:
        return [n for n in names if leases.is_of(WRITING, n)] == [self._lease.name]

    def release(self) -> None:
        self._lease.release()
        self._objects.remove_empty(self.path)

    def discard(self) -> None:
        if self._is_sole_writer(self._names()):  # else it is another's by now
            self._store.remove_own(self.path, last=self._lease.name)
        self.release()
