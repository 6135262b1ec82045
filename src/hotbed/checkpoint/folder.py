"""The folder of a run's checkpoints: one folder each, complete when its manifest is there.

::

    step-000000001000/       a checkpoint of step 1000
        checkpoint.json      its manifest, which names all other files; appears last
        dense.safetensors    what is no row of a table
        rows-W-N.safetensors file N of rows that writer W has written
        removed-W.safetensors ids that are no more, of one that has what has changed since another
        log-W-N/             hard links to files of rows on an SSD, see `hotbed.checkpoint.linked`
    step-000000001500.1/     what a run that went back, or began anew, wrote when step 2000 was there already

Who writes a checkpoint holds an exclusive lock on its folder, who reads one a shared lock; a folder
without manifest that nobody holds was left by a process that died, and the next save removes it.
Who names a checkpoint, or completes one and removes earlier ones, holds an exclusive lock on the
folder of the run, so that names rise in the order in which checkpoints were completed.
Other files are the user's and stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator

from hotbed.checkpoint.chain import Chains
from hotbed.checkpoint.files import CheckpointError, DamagedError, sync_folder
from hotbed.checkpoint.manifest import MANIFEST
from hotbed.checkpoint.manifest_faults import LOG

__all__ = [
    "MANIFEST",
    "OWN",
    "complete_folders",
    "complete_in",
    "folders_in",
    "held",
    "holds_file",
    "is_complete",
    "is_held",
    "is_of_checkpoints",
    "latest",
    "made_to_stay",
    "name_after",
    "opened",
    "order_of",
    "root_of",
    "whole_beside",
]

_NAME = re.compile(r"step-([0-9]{12,})(?:\.([0-9]+))?")
OWN = re.compile(r"(dense|rows-[0-9]+-[0-9]+|removed-[0-9]+)\.safetensors|checkpoint\.json(\.new)?")


def is_of_checkpoints(name: str) -> bool:
    """Whether a file of that name, relative to the folder of a run or a checkpoint, is a checkpoint's."""
    first, _, rest = name.partition(os.sep)
    return bool(
        _NAME.fullmatch(first) or LOG.fullmatch(first) or (not rest and OWN.fullmatch(first))
    )


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
        # Else what was complete may have been removed just now, as another one is by now.
        if found or all(map(os.path.lexists, folders)):
            return found


def complete_folders(root: str) -> list[str]:
    """The folders in that of a run that are complete checkpoints, whatever their names.

    Raises:
        OSError: what is there cannot be looked at.
    """
    with os.scandir(root) as entries:
        folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [folder for folder in folders if is_complete(folder)]


def folders_in(root: str) -> list[str]:
    """The folders of checkpoints of a run, complete or not, in the order of their names.

    Raises:
        OSError: what is there cannot be looked at.
    """
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [os.path.join(root, name) for _, name in sorted(_numbered(names))]


def root_of(path: str | os.PathLike[str]) -> str:
    """The absolute path at which checkpoints are to be.

    Raises:
        CheckpointError: it is empty, or has a zero byte.
    """
    if not (name := os.fsdecode(path)):
        raise CheckpointError("The path of a checkpoint is empty. Name a folder.")
    if "\0" in name:
        raise CheckpointError(f"The path {name!r} has a zero byte.")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise CheckpointError(
            f"The path {name!r} is no text that a file can be named by."
        ) from None
    return os.path.abspath(name)


def order_of(folder: str) -> tuple[int, int]:
    """(turn, step) in the name of a checkpoint's folder, which rise as they are completed; (-1, -1) of
    another folder."""
    found = _numbered([os.path.basename(folder)])
    return found[0][0] if found else (-1, -1)


def latest(root: str | os.PathLike[str]) -> str | None:
    """Return the folder of the checkpoint that `hotbed.load` would read; None: there is none.

    Raises:
        CheckpointError: what is there cannot be looked at, or the path is empty.
    """
    found = complete_at(os.path.realpath(root_of(root)))
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


def _numbered(names: Iterable[str]) -> list[tuple[tuple[int, int], str]]:
    """((turn, step), name) of folders of checkpoints. A run that goes back, or begins anew, takes the next
    turn, and what it saves is later than all of the turn before."""
    found = [(match, name) for name in names if (match := _NAME.fullmatch(name))]
    return [((int(match[2] or 0), int(match[1])), name) for match, name in found]


def name_after(names: Iterable[str], step: int) -> str:
    """The name of a checkpoint that comes behind all others."""
    turn, last = max((numbers for numbers, _ in _numbered(names)), default=(0, -1))
    turn += last >= step
    return f"step-{step:012d}{f'.{turn}' if turn else ''}"


def is_complete(folder: str) -> bool:
    """Return True if the checkpoint has its manifest."""
    try:
        return stat.S_ISREG(os.lstat(os.path.join(folder, MANIFEST)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def made_to_stay(path: str) -> bool:
    """Makes a folder and those above it that are missing. Whether it was not there.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.isdir(path):
        return False
    above = os.path.dirname(path)
    made_to_stay(above)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):  # else somebody made it just now
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    sync_folder(above)
    return True


@contextlib.contextmanager
def opened(path: str) -> Iterator[str]:
    """For a ``with`` statement, in which nobody removes it: the folder of the checkpoint at `path`, which
    is its own or that of a run, whose latest is meant.

    Raises:
        CheckpointError: there is none.
        DamagedError: what is raised inside, with the names of whole ones beside it.
    """
    path = os.path.realpath(root_of(path))
    while True:
        found = complete_at(path)
        if not found:
            what = "no checkpoint" if os.path.isdir(path) else "no folder"
            raise CheckpointError(f"There is {what} {path!r}. hotbed.save makes checkpoints.")
        folder = found[-1]
        with contextlib.ExitStack() as stack:
            try:
                there = stack.enter_context(held(folder, fcntl.LOCK_SH))
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
    try:
        with held(folder, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True


@contextlib.contextmanager
def held(folder: str, how: int) -> Iterator[bool]:
    """Keeps others from removing it: whether it was still there by then.

    Raises:
        BlockingIOError: somebody else holds it, and `how` says not to wait.
        FileNotFoundError: it is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            raise
        except OSError:  # not every file system can
            if how & fcntl.LOCK_NB:
                raise BlockingIOError from None
        try:
            there = os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except FileNotFoundError:
            there = False
        yield there
    finally:
        with contextlib.suppress(OSError):  # a child that was forked meanwhile has it, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):  # nothing was written to it
            os.close(descriptor)
