"""The folder of a run's checkpoints: one folder each, complete when its manifest is there.

::

    step-000000001000/       a checkpoint of step 1000
        checkpoint.json      its manifest, which names all other files; appears last
        dense.safetensors    what is no row of a table
        rows-W-N.safetensors file N of rows that writer W has written
    step-000000001500.1/     what a run that went back, or began anew, wrote when step 2000 was there already

Who writes a checkpoint holds an exclusive lock on its folder, who reads one a shared lock; a folder
without manifest that nobody holds was left by a process that died, and the next save removes it.
Other files are the user's and stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotbed.checkpoint.files import CheckpointError, sync_folder, write_json_sealed

__all__ = [
    "MANIFEST",
    "complete_in",
    "finish",
    "holds_file",
    "is_of_checkpoints",
    "keep_latest",
    "latest",
    "made_to_stay",
    "new_folder",
    "opened",
    "sweep",
]

MANIFEST = "checkpoint.json"
_NEXT = "checkpoint.json.new"
_NAME = re.compile(r"step-([0-9]{12,})(?:\.([0-9]+))?")
_OWN = re.compile(r"(dense|rows-[0-9]+-[0-9]+)\.safetensors|checkpoint\.json(\.new)?")


def is_of_checkpoints(name: str) -> bool:
    """Whether a file of that name, relative to the folder of a run or a checkpoint, is a checkpoint's."""
    first, _, rest = name.partition(os.sep)
    return bool(_NAME.fullmatch(first) or (not rest and _OWN.fullmatch(first)))


def holds_file(root: str, name: str) -> bool:
    """Whether a file of that name, relative to a folder, is of a checkpoint that is there."""
    return is_of_checkpoints(name) and (_is_complete(root) or bool(complete_in(root)))


def complete_in(root: str) -> list[str]:
    """The complete checkpoints of a run, as they were begun.

    Raises:
        OSError: what is there cannot be looked at.
    """
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    folders = [os.path.join(root, name) for _, name in sorted(_begun(names))]
    return [f for f in folders if not os.path.islink(f) and _is_complete(f)]


def latest(root: str | os.PathLike[str]) -> str | None:
    """The folder of the checkpoint that `hotbed.load` would read; None: there is none.

    Raises:
        CheckpointError: what is there cannot be looked at.
    """
    found = _found(os.path.realpath(os.fsdecode(root)))
    return found[-1] if found else None


def _found(path: str) -> list[str]:
    """The complete checkpoints at a path, which is one itself or the folder of a run."""
    try:
        return [path] if _is_complete(path) else complete_in(path)
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where} cannot be read: {error.strerror}.") from None


def _begun(names: Sequence[str]) -> list[tuple[tuple[int, int], str]]:
    """((turn, step), name) of folders of checkpoints. A run that goes back, or begins anew, takes the next
    turn, and what it saves is later than all of the turn before."""
    found = [(match, name) for name in names if (match := _NAME.fullmatch(name))]
    return [((int(match[2] or 0), int(match[1])), name) for match, name in found]


def _is_complete(folder: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(os.path.join(folder, MANIFEST)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def new_folder(root: str, step: int) -> Iterator[str]:
    """For a ``with`` statement: an empty folder for the checkpoint of a step, which is gone again if
    that fails.

    Raises:
        CheckpointError: `root` is a checkpoint.
        OSError: it cannot be made.
    """
    made = made_to_stay(os.path.abspath(root))
    if _is_complete(root):
        raise CheckpointError(f"{root} is a checkpoint itself. Name the folder that it lies in.")
    while True:
        turn, last = max((begun for begun, _ in _begun(os.listdir(root))), default=(0, -1))
        turn += last >= step
        folder = os.path.join(root, f"step-{step:012d}{f'.{turn}' if turn else ''}")
        with contextlib.ExitStack() as stack:
            try:
                os.mkdir(folder)
                there = stack.enter_context(_held(folder, fcntl.LOCK_EX))
            except (FileExistsError, FileNotFoundError):
                continue
            except OSError:
                for empty in [folder, root] if made else [folder]:
                    with contextlib.suppress(OSError):
                        os.rmdir(empty)
                raise
            if not there:  # somebody took it for what a dead process has left
                continue
            try:
                yield folder
            except BaseException:
                with contextlib.suppress(OSError):
                    _remove(folder)
                    if made:
                        os.rmdir(root)
                raise
            return


def made_to_stay(path: str) -> bool:
    """Makes a folder and those above it that are missing. Whether it was not there.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.isdir(path):
        return False
    above = os.path.dirname(path)
    made_to_stay(above)
    with contextlib.suppress(FileExistsError):  # somebody else made it just now
        os.mkdir(path)
    sync_folder(above)
    return True


def finish(folder: str, manifest: Mapping[str, Any]) -> None:
    """Makes a checkpoint whose files are there a complete one.

    Raises:
        OSError: it is not.
    """
    following = os.path.join(folder, _NEXT)
    write_json_sealed(following, manifest)
    sync_folder(folder)
    os.replace(following, os.path.join(folder, MANIFEST))
    sync_folder(folder)
    sync_folder(os.path.dirname(folder))


@contextlib.contextmanager
def opened(path: str) -> Iterator[str]:
    """For a ``with`` statement, in which nobody removes it: the folder of the checkpoint at `path`, which
    is its own or that of a run, whose latest is meant.

    Raises:
        CheckpointError: there is none.
    """
    if not path:
        raise CheckpointError("The path of a checkpoint is empty.")
    path = os.path.realpath(path)
    while True:
        found = _found(path)
        if not found:
            what = "no checkpoint" if os.path.isdir(path) else "no folder"
            raise CheckpointError(f"There is {what} {path!r}. hotbed.save makes checkpoints.")
        folder = found[-1]
        with contextlib.ExitStack() as stack:
            try:
                there = stack.enter_context(_held(folder, fcntl.LOCK_SH))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from None
            if there and _is_complete(folder):
                yield folder
                return


def keep_latest(root: str, count: int, newest: str) -> None:
    """Removes complete checkpoints but `newest` and the latest `count` - 1 others. Those that somebody reads,
    or that cannot be removed, stay for now."""
    with contextlib.suppress(OSError):
        others = [folder for folder in complete_in(root) if folder != newest]
        for folder in others[: max(0, len(others) - (count - 1))]:
            _remove_unheld(folder)


def sweep(root: str) -> None:
    """Removes what processes that died have left of checkpoints."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(root):
            folder = os.path.join(root, name)
            if _NAME.fullmatch(name) and not os.path.lexists(os.path.join(folder, MANIFEST)):
                _remove_unheld(folder, unless_complete=True)


def _remove_unheld(folder: str, *, unless_complete: bool = False) -> None:
    with (
        contextlib.suppress(OSError),
        _held(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as there,
    ):
        if there and not (unless_complete and os.path.lexists(os.path.join(folder, MANIFEST))):
            _remove(folder)


def _remove(folder: str) -> None:
    """Removes what is Hotbed's in it, the manifest first, and the folder if nothing else is there."""
    for name in sorted(os.listdir(folder), key=lambda name: name != MANIFEST):
        path = os.path.join(folder, name)
        if _OWN.fullmatch(name) and not os.path.isdir(path):
            os.unlink(path)
            if name == MANIFEST:
                sync_folder(folder)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


@contextlib.contextmanager
def _held(folder: str, how: int) -> Iterator[bool]:
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
