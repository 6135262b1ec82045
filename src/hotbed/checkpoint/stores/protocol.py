"""The interface of stores that have the files of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hotbed.checkpoint.entries import SizedFile

__all__ = ["Files", "NewFolder", "Reader", "Store"]


class Reader(AbstractContextManager["Reader"], Protocol):
    """An open file, read from its beginning.

    Attributes:
        size: bytes of the file.
    """

    @property
    def size(self) -> int: ...

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill a buffer, or a part of it, with the bytes that follow. Returns how many; 0 at the end."""

    def seek(self, offset: int, /) -> int:
        """Go on at a byte of the file."""


class NewFolder(Protocol):
    """The folder of a new checkpoint, in which only its writer writes and which nobody removes until it is
    released.

    Attributes:
        path: of the folder; `publish` may rename it.
        is_there: False if another process has removed it before it was locked.
    """

    path: str
    is_there: bool

    def prepare(self, manifest: Sequence[bytes], files: Iterable[SizedFile]) -> None:
        """Write what can be written of the manifest before the run is locked, when all files are there.

        Raises:
            OSError, CheckpointError: it cannot be complete.
        """

    def publish(self, last: tuple[int, int]) -> None:
        """Make the checkpoint complete, as the latest, while the run is locked.

        Args:
            last: order of the latest that is complete already.

        Raises:
            OSError, CheckpointError: it is not complete.
        """

    def release(self) -> None:
        """Let others remove it."""

    def discard(self) -> None:
        """Remove what was written of a checkpoint that is not complete.

        Raises:
            OSError: some of it is left.
        """


class Files(Protocol):
    """Files and folders of a store. Any thread may call anything at any time."""

    def absolute(self, path: str) -> str:
        """Return the path whatever the current directory will be.

        Raises:
            CheckpointError: nothing can be at such a path.
        """

    def resolved(self, path: str) -> str:
        """Return the one spelling of a path, links followed."""

    def is_folder(self, path: str) -> bool: ...

    def is_file(self, path: str) -> bool:
        """Return True if something is there that is no folder."""

    def is_there(self, path: str) -> bool:
        """Return True if a file, folder or link is there."""

    def names_in(self, folder: str) -> list[str]:
        """Names of files and folders in a folder.

        Raises:
            OSError: it cannot be listed.
        """

    def folders_in(self, folder: str) -> list[str]:
        """Names of folders in a folder.

        Raises:
            OSError: it cannot be listed.
        """

    def changed_at(self, path: str) -> float:
        """Return when a file, or what is in a folder, was last written, in seconds since 1970.

        Raises:
            OSError: it is not there.
        """

    def free_bytes(self, path: str) -> int | None:
        """Return the room that is left at a path; None: there is no limit, or none that is known."""

    def try_writing(self, folder: str) -> None:
        """Make sure that a folder, which may not be there yet, can be written to; nothing stays.

        Raises:
            OSError: it cannot.
        """

    def write_new(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file where none is, to stay: one piece after the other.

        Raises:
            OSError: a part of it may be there; nothing, if it is a FileExistsError.
        """

    def write_new_beside(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write as `write_new`, in the way that leaves most of the processors to those who work meanwhile."""

    def open_plain(self, path: str) -> Reader:
        """Open a plain file to read.

        Raises:
            DamagedError: it is missing, or is none.
            OSError: the store cannot be reached.
        """

    def remove_file(self, path: str) -> None:
        """Remove a file.

        Raises:
            OSError: it is still there, or was not.
        """

    def sizes_in(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder.

        Raises:
            OSError: it cannot be listed.
        """

    def fault_of_files(self, folder: str, files: Iterable[SizedFile]) -> str:
        """Which of some files of a manifest is missing, no plain file or of another size; empty for none."""

    def refuse_links(self, what: str, remedy: str) -> None:
        """Raise CheckpointError where files cannot be hard links.

        Args:
            what: what makes or has them, as the beginning of a sentence.
            remedy: what to do about it.
        """


class Store(Files, Protocol):
    """A file system or object storage, and the checkpoints in it."""

    def is_complete(self, folder: str) -> bool:
        """Return True if the checkpoint has its manifest.

        Raises:
            OSError: that cannot be told.
        """

    def reading(self, folder: str) -> AbstractContextManager[bool]:
        """For a ``with`` statement, in which nobody removes a checkpoint: whether it was still there by then.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be locked.
        """

    def is_being_written(self, folder: str) -> bool:
        """Return True if a process writes to this incomplete checkpoint, or the store cannot tell."""

    def make_folder(self, path: str) -> bool:
        """Make a folder and those above it that are missing. Returns True if it was not there.

        Raises:
            OSError: it cannot be made.
        """

    def remove_empty(self, folder: str) -> None:
        """Remove a folder with nothing in it.

        Raises:
            OSError: it is still there.
        """

    def alone_in(self, root: str) -> AbstractContextManager[object]:
        """For a ``with`` statement, in which no other process names or completes checkpoints of a run, as far
        as the store can prevent that.

        Raises:
            OSError: it cannot be locked.
        """

    def new_folder(self, root: str, step: int) -> NewFolder:
        """Make the folder of a checkpoint that comes behind all others, while the run is locked.

        Raises:
            FileExistsError, FileNotFoundError: others write there; ask again.
            OSError, CheckpointError: it cannot be made.
        """

    def remove_unused(self, folder: str, unless: Callable[[], bool]) -> None:
        """Remove a checkpoint, its manifest first, while the run is locked; unless somebody reads it, or it
        cannot be removed.

        Args:
            unless: whether it is needed after all, by one that was completed meanwhile; asked when nobody can
                begin to read it any more, where others can complete checkpoints in spite of the lock.
        """

    def remove_left_over(self, folder: str) -> None:
        """Remove what a process that died has left of a checkpoint, while the run is locked."""
