"""Manifests of a bundle and of its versions, as they are read."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from hotbed import _core
from hotbed.checkpoint.errors import DamagedError
from hotbed.checkpoint.files import read_json_sealed
from hotbed.serve.bundles.bundle import (
    FORMAT,
    MANIFEST,
    VERSION,
    Bundle,
    BundleError,
    FileEntry,
    TableEntry,
)

__all__ = [
    "VERSION_FORMAT",
    "VERSION_MANIFEST",
    "VersionEntry",
    "check_contents",
    "files_in",
    "read_bundle",
    "read_version",
    "read_whole",
]

VERSION_FORMAT = "hotbed bundle version"
VERSION_MANIFEST = "version.json"


class Followed(TypedDict):
    """The checkpoint that a version was made of."""

    name: str
    """Folder, in that of its run."""
    uid: str | None


class VersionEntry(TypedDict):
    """The manifest of a version, which has all that differs from the bundle."""

    format: str
    version: int
    base: str
    """`model_version` of the bundle."""
    model_version: str
    number: int
    """Rises from version to version."""
    step: int
    checkpoint: Followed
    tables: dict[str, list[TableEntry]]
    """By table, layers of rows over those of the bundle, the oldest first: ids and their rows, in each layer
    rising and each once. Of an id, the newest layer that has it counts."""
    files: list[FileEntry]


def read_bundle(folder: str) -> Bundle:
    """Return the manifest of the bundle at a path; it is parsed again only when it was replaced.

    Raises:
        BundleError: there is none, or it is damaged or of a later version.
    """
    path = os.path.join(os.path.abspath(folder), MANIFEST)
    try:
        found = os.stat(path)
    except OSError as error:
        raise BundleError(
            f"{folder} is no bundle: {MANIFEST} cannot be read ({error.strerror}). hotbed.export writes one."
        ) from None
    return _bundle(path, found.st_ino, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=16)
def _bundle(path: str, inode: int, written: int, size: int) -> Bundle:
    return cast(Bundle, _read(path, FORMAT))


def read_version(folder: str) -> VersionEntry:
    """Return the manifest of the version in a folder.

    Raises:
        BundleError: it is missing, damaged or of a later version.
    """
    return cast(VersionEntry, _read(os.path.join(folder, VERSION_MANIFEST), VERSION_FORMAT))


def read_whole(folder: str, name: str, files: list[FileEntry]) -> bytes:
    """Return the contents of a file, as its manifest has it.

    Args:
        files: what the manifest says.

    Raises:
        BundleError: it is damaged.
        OSError: it cannot be read.
    """
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        contents = file.read()
    check_contents(path, contents, name, files)
    return contents


def check_contents(path: str, contents: bytes, name: str, files: list[FileEntry]) -> None:
    """Raise BundleError unless the contents of the file at `path` are as its manifest says."""
    wanted = next((each["crc32c"] for each in files if each["name"] == name), None)
    found = f"{_core.crc32c(np.frombuffer(contents, np.uint8)):08x}"
    if found != wanted:
        raise BundleError(
            f"{path} is damaged: its CRC32C is {found}, and its manifest says {wanted}. Export the bundle "
            "again."
        )


def _read(path: str, of_format: str) -> object:
    try:
        found, sealed = read_json_sealed(path)
    except (DamagedError, OSError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from None
    match found:
        case {"format": str(format_), "version": int(version)} if format_ == of_format and sealed:
            if version > VERSION:
                raise BundleError(
                    f"{path} is of version {version}; this Hotbed reads {VERSION} and before. Update it."
                )
            return found
    raise BundleError(f"{path} is damaged, or was changed. Export the bundle again.")


def files_in(folder: str, known: Collection[str] = ()) -> list[FileEntry]:
    """Bring files to the disk. Returns what the manifest says of them, but for those that are `known`."""
    found: list[FileEntry] = []
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in known:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            contents = (
                np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
            )
            sum_of = _core.crc32c(contents)
            found.append({"name": name, "bytes": contents.size, "crc32c": f"{sum_of:08x}"})
    return found
