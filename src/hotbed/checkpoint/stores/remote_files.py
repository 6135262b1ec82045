"""Files of checkpoints as objects: each is written once, as a whole, and read by ranges."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from types import TracebackType

from hotbed.checkpoint.entries import SizedFile
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.stores.leases import WRITING
from hotbed.checkpoint.stores.objects import PIECE_BYTES, Entry, Objects
from hotbed.checkpoint.stores.protocol import Reader

__all__ = ["RemoteFiles"]


class RemoteFiles:
    """Files and folders that are objects and beginnings of their names."""

    def __init__(self, url: str) -> None:
        """`url`: of anything in the storage."""
        self.objects = Objects(url)

    def absolute(self, path: str) -> str:
        return self.objects.spelled(path)

    def resolved(self, path: str) -> str:
        return self.objects.spelled(path)

    def is_folder(self, path: str) -> bool:
        return (found := self._entry(path)) is not None and found.is_folder

    def is_file(self, path: str) -> bool:
        return (found := self._entry(path)) is not None and not found.is_folder

    def is_there(self, path: str) -> bool:
        return self._entry(path) is not None

    def _entry(self, path: str) -> Entry | None:
        try:
            return self.objects.entry(path)
        except FileNotFoundError:
            return None

    def names_in(self, folder: str) -> list[str]:
        return [entry.name for entry in self.objects.entries(folder)]

    def folders_in(self, folder: str) -> list[str]:
        return [entry.name for entry in self.objects.entries(folder) if entry.is_folder]

    def changed_at(self, path: str) -> float:
        found = self.objects.entry(path)
        if not found.is_folder:
            return found.changed
        times = [e.changed for e in self.objects.entries(path) if not e.is_folder]
        if not times:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return max(times)

    def free_bytes(self, path: str) -> int | None:
        return None

    def try_writing(self, folder: str) -> None:
        path = f"{folder}/{WRITING}-{secrets.token_hex(16)}"
        self.objects.put(path, b"")
        self.objects.remove(path)

    def write_new(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        self.objects.put_new(path, pieces)

    def write_new_beside(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        self.objects.put_new(path, pieces)

    def open_plain(self, path: str) -> Reader:
        if (found := self._entry(path)) is None:
            raise DamagedError(f"{path} is missing.")
        if found.is_folder:
            raise DamagedError(f"{path} is no plain file. A checkpoint is plain files.")
        return _Ranges(self.objects, path, found.size)

    def remove_file(self, path: str) -> None:
        self.objects.remove(path)

    def sizes_in(self, folder: str) -> dict[str, int]:
        return {e.name: e.size for e in self.objects.entries(folder) if not e.is_folder}

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
