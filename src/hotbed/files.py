"""Files that appear when they are complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["appearing", "is_special", "part_of"]


@contextmanager
def appearing(path: str | os.PathLike[str]) -> Iterator[str]:
    """The path to write what is to appear at `path` when the block ends; if it fails, `path` stays.

    A device or a pipe is its own: it must not be replaced by a file. Two processes must not write
    one file at a time.
    """
    if is_special(path):
        yield os.fspath(path)
        return
    part = part_of(path)
    try:
        yield part
        os.replace(part, os.path.realpath(path))
    finally:
        if os.path.exists(part):
            os.unlink(part)


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether something is there that is no plain file."""
    return os.path.exists(path) and not os.path.isfile(path)


def part_of(path: str | os.PathLike[str]) -> str:
    """Where what is to appear at `path` lies until then: in the same folder, links followed."""
    return f"{os.path.realpath(path)}.part"
