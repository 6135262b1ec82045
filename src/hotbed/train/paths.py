"""That nothing which a command reads or writes is lost to something else that it writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hotbed.checkpoint import folder as checkpoints
from hotbed.files import is_special
from hotbed.train import run_files, run_note
from hotbed.train.report import OutputError

__all__ = ["Folder", "Named", "refuse_clashes"]


_HELD_FILES = (
    (run_note.holds_file, "the rows of a run"),
    (checkpoints.holds_file, "a checkpoint"),
    (run_files.holds_file, "the record of a run"),
)
_DEEPEST = 2
"""Folders between such a file and its folder, with that."""


class Named(NamedTuple):
    """A path, and how the user named it."""

    option: str
    path: str

    def __str__(self) -> str:
        return f"{self.option} {self.path}"


class Folder(NamedTuple):
    """A folder in which a command keeps files, beside others of the user."""

    named: Named
    owns: Callable[[str], bool]
    """Whether a file of this name, relative to the folder, is the command's."""


def refuse_clashes(
    reads: Sequence[Named], writes: Sequence[Named], folders: Sequence[Folder] = ()
) -> None:
    """Refuses a file that is written and named twice, or that is a folder's own: of one of `folders`, or
    of any saved model or run.

    However the paths are spelled: relative, through links, by a hard link. Devices and pipes may be
    named as often as one likes.

    Raises:
        OutputError: nothing has been opened.
    """
    written = [*writes, *(folder.named for folder in folders)]
    for named in (*reads, *written):
        if "\0" in named.path:
            raise OutputError(
                f"{named.option} {named.path!r} has a zero byte, which no path can have."
            )
    for at, one in enumerate(written):
        for other in (*reads, *written[:at]):
            if not is_special(one.path) or os.path.isdir(one.path):
                if _same(one.path, other.path):
                    raise OutputError(f"{other} and {one} are the same file. Name another.")
    for named in writes:
        path = Path(os.path.realpath(named.path))
        for parent in path.parents[:_DEEPEST]:
            name = str(path.relative_to(parent))
            for held, what in _HELD_FILES:
                if held(str(parent), name):
                    raise OutputError(f"{named} is a file of {what}. Name another.")
    for folder in folders:
        for named in (*reads, *written):
            if named is folder.named:
                continue
            if _within(named.path, folder) or any(_same(named.path, own) for own in _own(folder)):
                raise OutputError(
                    f"{named} is a file that {folder.named} keeps for itself. Name another."
                )


def _same(one: str, other: str) -> bool:
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def _within(path: str, folder: Folder) -> bool:
    """Whether a file would be one of the folder's own, if it were made."""
    real = Path(os.path.realpath(path))
    for parent in real.parents:
        if _same(str(parent), folder.named.path):
            # Some file systems do not tell capital letters from small ones.
            return folder.owns(str(real.relative_to(parent)).lower())
    return False


def _own(folder: Folder) -> Iterator[str]:
    """The folder's own files that there are."""
    for top, _, names in os.walk(folder.named.path):
        for name in names:
            path = os.path.join(top, name)
            if folder.owns(os.path.relpath(path, folder.named.path)):
                yield path
