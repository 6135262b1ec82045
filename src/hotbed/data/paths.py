"""Paths of data: files, folders of files, and patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable

from hotbed.data.lines import DataError
from hotbed.text import brief

__all__ = ["Paths", "files_of"]

Paths = str | bytes | os.PathLike[str] | Iterable[str | bytes | os.PathLike[str]]
_PATTERN = frozenset("*?[")


def files_of(paths: Paths) -> list[str]:
    """Files of paths in the order given; those of a folder, and of folders in it, or of a pattern are sorted.

    Files and folders whose names begin with "." or "_" are left out of folders.

    Raises:
        FileNotFoundError: nothing is there.
        DataError: no path, or a folder without files.
    """
    given = [paths] if isinstance(paths, str | bytes | os.PathLike) else paths
    try:
        names = [os.fsdecode(path) for path in given]
    except TypeError as error:
        raise TypeError(f"paths must be a path or several, got {brief(paths)}: {error}.") from None
    if not names:
        raise DataError("No file was given: paths is empty.")
    return [file for name in names for file in _files(name)]


def _files(name: str) -> list[str]:
    if "\0" in name or not name:
        raise DataError(f"{name!r} is no path.")
    if os.path.isdir(name):
        found = sorted(_below(name))
    elif os.path.isfile(name):
        return [name]
    elif os.path.exists(name):
        raise DataError(
            f"{name!r} is a device or a pipe; data must be in files, read several times."
        )
    elif _PATTERN & set(name):
        matching = sorted(glob.glob(name, recursive=True))
        found = [file for one in matching for file in (_files(one) if _is_seen(one) else [])]
    else:
        raise FileNotFoundError(f"Data file {name!r} does not exist.")
    if not found:
        raise DataError(f"{name!r} has no files of data.")
    return found


def _below(folder: str) -> list[str]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if _is_seen(one)]
        found += [os.path.join(parent, file) for file in files if _is_seen(file)]
    return found


def _is_seen(path: str) -> bool:
    return not os.path.basename(path).startswith((".", "_"))
