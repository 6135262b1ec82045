"""Objects of a storage that fsspec knows, as files are: errors are those of `OSError`, nothing is cached, and
memory is bounded."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import fsspec

from hotbed.checkpoint.errors import CheckpointError

__all__ = ["PIECE_BYTES", "Entry", "Objects"]

PIECE_BYTES = 16 << 20
"""Of one request that reads or writes; a multipart upload has such parts."""

_OPTIONS: dict[str, dict[str, bool]] = {"file": {"auto_mkdir": True}, "local": {"auto_mkdir": True}}
"""By scheme, of its file system beside that listings are not cached."""
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""By scheme, the extra of Hotbed that installs what it needs."""
_TRIES = 20
"""Of a call that others have disturbed."""
_Result = TypeVar("_Result")


class Entry(NamedTuple):
    """An object, or a folder of some, in a listing."""

    name: str
    """Without the folder."""
    is_folder: bool
    size: int
    """Bytes; 0 of a folder."""
    changed: float
    """When it was written, in seconds since 1970; infinite where the storage does not tell."""


class Objects:
    """The objects of one storage. Threads may share one, forked processes not."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            CheckpointError: packages are missing, or the scheme is unknown.
        """
        scheme = url.partition("://")[0]
        self._has_folders = scheme in _OPTIONS
        options = {"use_listings_cache": False, **_OPTIONS.get(scheme, {})}
        try:
            self._fs, _ = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            how = str(error) if extra is None else f"pip install 'hotbed[{extra}]'"
            raise CheckpointError(f"{url} needs a package that is not installed: {how}") from None
        except ValueError as error:
            raise CheckpointError(
                f"{url} has a scheme that fsspec does not know: {error}"
            ) from None

    def spelled(self, url: str) -> str:
        """Return the one spelling of a URL.

        Raises:
            CheckpointError: it names no folder.
        """
        path = fsspec.core.strip_protocol(url)
        if not path.strip("/"):
            raise CheckpointError(f"{url} names no folder. Name one in it.")
        spelled = str(self._fs.unstrip_protocol(path))
        return spelled if self._has_folders else spelled.replace(":///", "://", 1)

    def entries(self, folder: str) -> list[Entry]:
        """List a folder.

        Raises:
            FileNotFoundError: nothing is there.
            OSError: it cannot be listed.
        """
        with _as_os_errors(folder):
            found = self._repeated(lambda: self._fs.ls(folder, detail=True))
        own = fsspec.core.strip_protocol(folder).strip("/")
        entries = []
        for one in found:
            path = str(one["name"]).strip("/")
            if path == own:  # an object of the folder's own name, or a mark that there is one
                continue
            is_folder = one["type"] == "directory"
            size = 0 if is_folder else int(one["size"])
            entries.append(Entry(os.path.basename(path), is_folder, size, _time_of(one)))
        return entries

    def entry(self, path: str) -> Entry:
        """Look at one object, or at a folder.

        Raises:
            OSError: it is not there, or cannot be looked at.
        """
        with _as_os_errors(path):
            one = self._fs.info(path)
        is_folder = one["type"] == "directory"
        size = 0 if is_folder else int(one["size"])
        return Entry(os.path.basename(path), is_folder, size, _time_of(one))

    def contents(self, path: str, first: int | None = None, end: int | None = None) -> bytes:
        """Read the bytes of an object from `first` up to `end`.

        Raises:
            OSError: it is not there, or cannot be read.
        """
        with _as_os_errors(path):
            return bytes(self._fs.cat_file(path, start=first, end=end))

    def put(self, path: str, contents: bytes) -> None:
        """Write an object at once, in place of one that is there.

        Raises:
            OSError: it cannot be written.
        """
        with _as_os_errors(path):
            self._repeated(lambda: self._fs.pipe_file(path, contents))

    def put_whole(self, path: str, contents: bytes) -> None:
        """Write an object as `put` does; also where the storage is of files, nobody sees a part of it.

        Raises:
            OSError: it cannot be written.
        """
        if not self._has_folders:
            return self.put(path, contents)
        self.put(f"{path}.new", contents)
        with _as_os_errors(path):
            self._fs.mv(f"{path}.new", path)

    def put_new(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write an object where none is, in parts that are uploaded as they come; none, if that fails.

        Raises:
            OSError: it cannot be written.
        """
        with _as_os_errors(path):
            if self._fs.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            file = self._fs.open(path, "wb", block_size=PIECE_BYTES)
        try:
            for piece in pieces:
                plain = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
                for begin in range(0, len(plain), PIECE_BYTES):
                    with _as_os_errors(path):
                        file.write(plain[begin : begin + PIECE_BYTES])
            with _as_os_errors(path):
                file.close()
        except BaseException:
            # In this order, as to close a file is to complete its upload.
            for end in (file.discard, lambda: setattr(file, "closed", True), file.close):
                with contextlib.suppress(Exception):
                    end()
            with contextlib.suppress(Exception):
                self._fs.rm_file(path)
            raise

    def _repeated(self, call: Callable[[], _Result]) -> _Result:
        """Return what a call does, and repeat it where another removes a folder, or a file that is listed,
        between two of its steps. Storages without folders have no such steps."""
        for _ in range(_TRIES if self._has_folders else 0):
            with contextlib.suppress(FileNotFoundError):
                return call()
        return call()

    def remove(self, path: str) -> None:
        """Remove an object.

        Raises:
            OSError: it is still there, or was not.
        """
        with _as_os_errors(path):
            self._fs.rm_file(path)

    def remove_empty(self, folder: str) -> None:
        """Remove a folder with nothing in it, where the storage has folders."""
        if self._has_folders:
            with contextlib.suppress(OSError):
                self._fs.rmdir(folder)


def _time_of(entry: dict[str, object]) -> float:
    for name in ("LastModified", "mtime", "updated", "modified", "created"):
        match entry.get(name):
            case datetime.datetime() as when:
                return when.timestamp()
            case float() | int() as seconds:
                return float(seconds)
            case str() as text:
                with contextlib.suppress(ValueError):
                    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    return float("inf")


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """Packages of storages have errors of their own for a network or credentials that fail."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        kind = error.errno if isinstance(error, OSError) else None
        for number, of_kind in _ERRNOS.items():
            if isinstance(error, of_kind):
                kind = number
        if not isinstance(error, OSError):
            text = f"{type(error).__name__}: {text}"
        if kind == errno.ENOENT:
            text = os.strerror(errno.ENOENT)
        raise OSError(kind or errno.EIO, text, path) from error


_ERRNOS: dict[int, type[Exception]] = {
    errno.ENOENT: FileNotFoundError,
    errno.EEXIST: FileExistsError,
    errno.EACCES: PermissionError,
    errno.EROFS: NotImplementedError,
}
"""What fsspec raises without a number."""
