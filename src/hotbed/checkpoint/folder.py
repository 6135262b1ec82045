"""The folder of a run's checkpoints: one folder each, complete when its manifest is there.

::

    step-000000001000/       a checkpoint of step 1000
        checkpoint.json      its manifest, which names all other files; appears last
        dense.safetensors    what is no row of a table
        rows-W-N.safetensors file N of rows that writer W has written
    step-000000002000.1/     what step 2000 was written to when a folder of its name was there already

Who writes a checkpoint holds an exclusive lock on its folder, who reads one a shared lock; a folder
without manifest that nobody holds was left by a process that died, and the next save removes it.
Other files are the user's and stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hotbed.checkpoint.files import CheckpointError, sync_folder, write_json_sealed

__all__ = [
    "MANIFEST",
    "complete_in",
    "finish",
    "holds_file",
    "is_of_checkpoints",
    "keep_latest",
    "new_folder",
    "opened",
    "sweep",
]

MANIFEST = "checkpoint.json"
_NEXT = "checkpoint.json.new"
_NAME = re.compile(r"step-([0-9]{12,})(?:\.([0-9]+))?")
_OWN = re.compile(r"(dense|rows-[0-9]+-[0-9]+)\.safetensors|checkpoint\.json(\.new)?")


def is_of_checkpoints(name: str) -> bool:
    """Whether a file of that name, relative to the folder of a run, is of a checkpoint's."""
    first, _, _ = name.partition(os.sep)
    return _NAME.fullmatch(first) is not None


def holds_file(root: str, name: str) -> bool:
    """Whether a file of that name, relative to a folder of checkpoints, is part of one that is there."""
    return is_of_checkpoints(name) and bool(complete_in(root))


def complete_in(root: str) -> list[str]:
    """The complete checkpoints of a run, by step."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(root):
            match = _NAME.fullmatch(name)
            folder = os.path.join(root, name)
            if (
                match
                and not os.path.islink(folder)
                and os.path.isfile(os.path.join(folder, MANIFEST))
            ):
                found.append((int(match[1]), int(match[2] or 0), os.path.join(root, name)))
    return [folder for _, _, folder in sorted(found)]


@contextlib.contextmanager
def new_folder(root: str, step: int) -> Iterator[str]:
    """For a ``with`` statement: an empty folder for the checkpoint of a step, which is gone again if
    that fails.

    Raises:
        OSError: it cannot be made.
    """
    os.makedirs(root, exist_ok=True)
    while True:
        taken = [
            int(match[2] or 0)
            for name in os.listdir(root)
            if (match := _NAME.fullmatch(name)) and int(match[1]) == step
        ]
        attempt = max(taken) + 1 if taken else 0
        folder = os.path.join(root, f"step-{step:012d}{f'.{attempt}' if attempt else ''}")
        with contextlib.ExitStack() as stack:
            try:
                os.mkdir(folder)
                there = stack.enter_context(_held(folder, fcntl.LOCK_EX))
            except (FileExistsError, FileNotFoundError):
                continue
            if not there:  # somebody took it for what a dead process has left
                continue
            try:
                yield folder
            except BaseException:
                with contextlib.suppress(OSError):
                    _remove(folder)
                raise
            return


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
    path = os.path.realpath(path)
    while True:
        if os.path.isfile(os.path.join(path, MANIFEST)):
            folder = path
        elif found := complete_in(path):
            folder = found[-1]
        else:
            what = "no checkpoint" if os.path.isdir(path) else "no folder"
            raise CheckpointError(f"There is {what} {path!r}. hotbed.save makes checkpoints.")
        with contextlib.ExitStack() as stack:
            try:
                there = stack.enter_context(_held(folder, fcntl.LOCK_SH))
            except FileNotFoundError:
                continue
            if there and os.path.isfile(os.path.join(folder, MANIFEST)):
                yield folder
                return


def keep_latest(root: str, count: int, newest: str) -> None:
    """Removes complete checkpoints but `newest` and the latest `count` - 1 others. Those that somebody reads,
    or that cannot be removed, stay for now."""
    others = [folder for folder in complete_in(root) if folder != newest]
    for folder in others[: len(others) - (count - 1)]:
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
        os.close(descriptor)
