"""Files that appear when they are complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["Json", "appearing", "appearing_folder", "is_special", "new_beside", "read_toml"]


Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
"""Values that a JSON file can hold."""


@contextlib.contextmanager
def appearing(path: str | os.PathLike[str]) -> Iterator[str]:
    """The path to write what is to appear at `path` when the block ends; if it fails, `path` stays.

    A device or a pipe is its own: it must not be replaced by a file.

    Raises:
        OSError: about `path`, where no file can be made beside it.
    """
    if is_special(path):
        yield os.fspath(path)
        return
    part = new_beside(path)
    try:
        yield part
        os.replace(part, os.path.realpath(path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


@contextlib.contextmanager
def appearing_folder(path: str | os.PathLike[str]) -> Iterator[str]:
    """The folder to fill, which is at `path` when the block ends; if it fails, or something is there, it
    is gone.

    Raises:
        OSError: it cannot be made.
    """
    parent, name = os.path.split(os.path.abspath(path))
    part = os.path.join(parent, f"{name[:40]}.{secrets.token_hex(8)}.part")
    os.mkdir(part)
    try:
        yield part
        os.rename(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether something is there that is no plain file."""
    return os.path.exists(path) and not os.path.isfile(path)


def new_beside(path: str | os.PathLike[str]) -> str:
    """Makes an empty file in the folder of `path`, links followed, under a name that nothing had.

    Raises:
        OSError: about `path`.
    """
    folder, name = os.path.split(os.path.realpath(path))
    while True:
        part = os.path.join(folder, f"{name[:40]}.{secrets.token_hex(8)}.part")
        try:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            continue
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        return part


def read_toml(path: str | os.PathLike[str]) -> dict[str, object]:
    """Return the contents of a TOML file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    with open(path, "rb") as file:
        try:
            return dict(tomllib.load(file))
        except RecursionError as error:
            raise ValueError(str(error)) from None
