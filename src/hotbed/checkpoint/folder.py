"""The folder of a run's checkpoints: one folder each, complete when its manifest is there.

Who writes a checkpoint, or reads one, keeps others from removing it, each store in its own way (see
`hotbed.checkpoint.stores`); a folder without manifest whose writer is dead is removed by the next save.
Other files are the user's and stay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from hotbed.checkpoint.chain import Chains
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.names import (
    MANIFEST,
    OWN,
    is_of_checkpoints,
    name_after,
    numbered,
    order_of,
)
from hotbed.checkpoint.stores import store_of
from hotbed.paths import path_text

__all__ = [
    "MANIFEST",
    "OWN",
    "complete_folders",
    "complete_in",
    "folders_in",
    "holds_file",
    "is_complete",
    "is_held",
    "is_of_checkpoints",
    "latest",
    "name_after",
    "opened",
    "order_of",
    "root_of",
    "whole_beside",
]


def holds_file(root: str, name: str) -> bool:
    """Whether a file of that name, relative to a folder, is of a checkpoint that is there."""
    return is_of_checkpoints(name) and (is_complete(root) or bool(complete_in(root)))


def complete_in(root: str) -> list[str]:
    """The complete checkpoints of a run, as they were completed.

    Raises:
        OSError: what is there cannot be looked at.
    """
    while True:
        folders = folders_in(root)
        found = [folder for folder in folders if is_complete(folder)]
        # Else what was complete may have been removed just now, or is about to, as another one is by now.
        if found or (all(map(store_of(root).is_there, folders)) and folders == folders_in(root)):
            return found


def complete_folders(root: str) -> list[str]:
    """The folders in that of a run that are complete checkpoints, whatever their names.

    Raises:
        OSError: what is there cannot be looked at.
    """
    folders = [os.path.join(root, name) for name in store_of(root).folders_in(root)]
    return [folder for folder in folders if is_complete(folder)]


def folders_in(root: str) -> list[str]:
    """The folders of checkpoints of a run, complete or not, in the order of their names.

    Raises:
        OSError: what is there cannot be looked at.
    """
    try:
        names = store_of(root).folders_in(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [os.path.join(root, name) for _, name in sorted(numbered(names))]


def root_of(path: str | os.PathLike[str], name: str = "path") -> str:
    """The absolute path at which checkpoints are to be, as the argument of that name says.

    Raises:
        CheckpointError: it is empty, or has a zero byte.
        InputError: it is no path.
    """
    if not (text := path_text(path, name)):
        raise CheckpointError("The path of a checkpoint is empty. Name a folder.")
    if "\0" in text:
        raise CheckpointError(f"The path {text!r} has a zero byte.")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise CheckpointError(
            f"The path {text!r} is no text that a file can be named by."
        ) from None
    return store_of(text).absolute(text)


def latest(root: str | os.PathLike[str]) -> str | None:
    """Return the folder of the checkpoint that `hotbed.load` would read; None: there is none.

    Raises:
        CheckpointError: what is there cannot be looked at, or the path is empty.
        InputError: `root` is no path.
    """
    path = root_of(root, "root")
    found = complete_at(store_of(path).resolved(path))
    return found[-1] if found else None


def complete_at(path: str) -> list[str]:
    """The complete checkpoints at a path, which is one itself or the folder of a run.

    Raises:
        CheckpointError: what is there cannot be looked at.
    """
    try:
        return [path] if is_complete(path) else complete_in(path)
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where} cannot be read: {error.strerror}.") from None


def is_complete(folder: str) -> bool:
    """Return True if the checkpoint has its manifest."""
    return store_of(folder).is_complete(folder)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[str]:
    """For a ``with`` statement, in which nobody removes it: the folder of the checkpoint at `path`, which
    is its own or that of a run, whose latest is meant.

    Raises:
        CheckpointError: there is none.
        DamagedError: what is raised inside, with the names of whole ones beside it.
    """
    path = root_of(path)
    store = store_of(path)
    path = store.resolved(path)
    while True:
        found = complete_at(path)
        if not found:
            what = "no checkpoint" if store.is_folder(path) else "no folder"
            raise CheckpointError(f"There is {what} {path!r}. hotbed.save makes checkpoints.")
        folder = found[-1]
        with contextlib.ExitStack() as stack:
            try:
                there = stack.enter_context(store.reading(folder))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from None
            if there and is_complete(folder):
                try:
                    yield folder
                except DamagedError as error:
                    if error.others is None:
                        error.name_others(whole_beside(folder, str(error)))
                    raise
                return


def whole_beside(folder: str, fault: str = "") -> list[str]:
    """The whole checkpoints of the same run, the latest first.

    Args:
        fault: names a file that is damaged, which no other needs that is listed.
    """
    if order_of(folder) < (0, 0):
        return []

    chains = Chains()

    def needs_what_is_damaged(other: str) -> bool:
        return any(os.path.join(one, "") in fault for one in (other, *chains.bases(other)))

    with contextlib.suppress(OSError):
        return [
            other
            for other in reversed(complete_in(os.path.dirname(folder)))
            if other != folder and not chains.fault(other) and not needs_what_is_damaged(other)
        ]
    return []


def is_held(folder: str) -> bool:
    """Return True if a process writes to this incomplete checkpoint, or the file system cannot tell."""
    return store_of(folder).is_being_written(folder)
