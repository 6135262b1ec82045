"""Object storage that fsspec knows: ``s3://``, ``gs://``, ``memory://`` and others.

An object is written once, as a whole: nothing is appended, renamed or linked. There are no locks, but leases
(see `hotbed.checkpoint.stores.leases`), for which listings must show what was written before, as those of S3
and GCS do.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from hotbed.checkpoint.entries import SizedFile
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.names import MANIFEST, OWN, name_after, order_of
from hotbed.checkpoint.stores import leases
from hotbed.checkpoint.stores.leases import LEASE, READING, REMOVING, WRITING, Lease
from hotbed.checkpoint.stores.protocol import NewFolder
from hotbed.checkpoint.stores.remote_files import RemoteFiles

__all__ = ["RemoteStore", "remote_store"]

_ABANDONED = 86400.0
"""Seconds since the last write into a folder without manifest and leases, after which its writer is dead."""
_MAY_NOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST_PAUSE = 0.2
"""Seconds, after two writers have wanted one name."""


def remote_store(url: str) -> RemoteStore:
    """Return the storage of a URL, one for all threads of this process, as each has connections of its own.

    Raises:
        CheckpointError: packages are missing, or the scheme is unknown.
    """
    scheme, _, rest = url.partition("://")
    return _store_of(os.getpid(), f"{scheme}://{rest.partition('/')[0]}")


@functools.cache
def _store_of(process: int, url: str) -> RemoteStore:
    """`process`: its number, as a forked one cannot use the connections of the one before."""
    return RemoteStore(url)


class RemoteStore(RemoteFiles):
    """A storage of objects."""

    def is_complete(self, folder: str) -> bool:
        try:
            names = self.names_in(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return MANIFEST in names and not any(leases.is_of(REMOVING, name) for name in names)

    @contextlib.contextmanager
    def reading(self, folder: str) -> Iterator[bool]:
        lease = Lease(self.objects, folder, READING)
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
            self.objects.remove_empty(folder)

    def is_being_written(self, folder: str) -> bool:
        return self._is_leased(folder, self.names_in(folder), WRITING)

    def _is_leased(self, folder: str, names: Iterable[str], kind: str) -> bool:
        """Return True if somebody has a lease of this kind that has not run out."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if leases.is_of(kind, name) and not leases.has_run_out(self.objects, folder, name):
                    return True
        return False

    def make_folder(self, path: str) -> bool:
        """Do nothing: a folder is there where objects are."""
        return False

    def remove_empty(self, folder: str) -> None:
        self.objects.remove_empty(folder)

    def alone_in(self, root: str) -> contextlib.AbstractContextManager[None]:
        """Do nothing: whoever names or completes a checkpoint finds out whether another does."""
        return contextlib.nullcontext()

    def new_folder(self, root: str, step: int) -> NewFolder:
        return _LeasedFolder(self, root, step)

    def remove_unused(self, folder: str, unless: Callable[[], bool]) -> None:
        with contextlib.suppress(OSError):
            if self._is_leased(folder, self.names_in(folder), READING):
                return
            mark = Lease(self.objects, folder, REMOVING)
            try:
                mark.take()
                if not self._is_leased(folder, self.names_in(folder), READING) and not unless():
                    self.remove_own(folder, but=[mark.name])
            finally:
                mark.release()
                self.objects.remove_empty(folder)

    def remove_left_over(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            self._remove(folder, self._abandoned_in(folder))

    def _abandoned_in(self, folder: str) -> list[str]:
        """Return the names of what is there of a checkpoint, if a process left it that is certainly dead.

        What comes later is not among them: another may begin a checkpoint of this name meanwhile.

        Raises:
            FileNotFoundError: its owner has just completed or removed it.
            OSError: it cannot be told.
        """
        found = self.objects.entries(folder)
        names = [entry.name for entry in found]
        if MANIFEST in names and not any(leases.is_of(REMOVING, name) for name in names):
            return []
        if found_leases := [name for name in names if LEASE.fullmatch(name)]:
            is_dead = all(leases.has_run_out(self.objects, folder, name) for name in found_leases)
        else:
            is_dead = max((e.changed for e in found), default=0.0) + _ABANDONED < leases.now()
        return names if is_dead else []

    def remove_own(self, folder: str, but: Collection[str] = ()) -> None:
        """Remove what is Hotbed's in a folder, the manifest first and leases last.

        Args:
            but: names of leases that stay.

        Raises:
            OSError: some of it is left.
        """
        self._remove(folder, [name for name in self.names_in(folder) if name not in but])

    def _remove(self, folder: str, names: Sequence[str]) -> None:
        files = [name for name in names if OWN.fullmatch(name)]
        own_leases = [name for name in names if LEASE.fullmatch(name)]
        for name in sorted(files, key=lambda name: name != MANIFEST) + own_leases:
            with contextlib.suppress(FileNotFoundError):  # another does so, too
                self.objects.remove(os.path.join(folder, name))
        self.objects.remove_empty(folder)


class _LeasedFolder:
    """The folder of a new checkpoint, which this process has a lease to write.

    The lease is the first object in it: who finds another's there takes back its own and tries the next name,
    so two writers never share one.
    """

    def __init__(self, store: RemoteStore, root: str, step: int) -> None:
        try:
            names = store.folders_in(root)
        except FileNotFoundError:
            names = []
        self._store, self.is_there = store, True
        self.path = os.path.join(root, name_after(names, step))
        self._manifest = b""
        self._lease = Lease(store.objects, self.path, WRITING)
        try:
            self._lease.take()
            found = store.names_in(self.path)
        except BaseException as error:
            self._lease.release()
            if isinstance(error, FileNotFoundError):
                raise CheckpointError(f"There is no bucket for {root}. Make it first.") from None
            raise
        # Who is about to read what was removed is gone again when it has seen that.
        others = {name for name in found if not leases.is_of(READING, name)} - {self._lease.name}
        if not others and self._lease.name in found:
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
        self._store.objects.put_whole(os.path.join(self.path, MANIFEST), self._manifest)

    def _refuse_lost(self) -> None:
        """Raise CheckpointError where others may have removed the folder, or have taken its name since."""
        if not self._is_ours(names := self._names()) or MANIFEST in names:
            raise CheckpointError(
                f"{self.path}: the lease of this save has run out, and others may have taken it for dead. "
                "Save again."
            )

    def _names(self) -> list[str]:
        try:
            return self._store.names_in(self.path)
        except FileNotFoundError:
            return []

    def _is_ours(self, names: Sequence[str]) -> bool:
        """Return True while nobody can have taken this process for dead. Others that want the name see the
        lease, and go."""
        return self._lease.name in names and not self._lease.is_lost

    def release(self) -> None:
        self._lease.release()
        self._store.objects.remove_empty(self.path)

    def discard(self) -> None:
        if self._is_ours(names := self._names()):
            self._store.remove_own(self.path, but=[n for n in names if LEASE.fullmatch(n)])
        self.release()
