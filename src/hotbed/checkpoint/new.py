"""A new checkpoint in the folder of a run, and the end of earlier ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping

from hotbed.checkpoint.chain import Chains
from hotbed.checkpoint.files import CheckpointError, sync_folder, write_json_sealed
from hotbed.checkpoint.folder import (
    MANIFEST,
    OWN,
    complete_folders,
    complete_in,
    folders_in,
    held,
    is_complete,
    made_to_stay,
    name_after,
    order_of,
)
from hotbed.checkpoint.manifest_faults import FILE_OF_LOG, LOG

__all__ = [
    "NEXT",
    "NewCheckpoint",
    "check_keep",
    "check_step",
    "new_folder",
    "remove_others",
    "sweep",
]

NEXT = "checkpoint.json.new"


def check_step(step: object) -> None:
    """Raises CheckpointError if `step` is no number of steps."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step must be an integer from 0 on, got {step!r}.")
    if step >= 2**63:
        raise CheckpointError("step must be less than 2**63.")


def check_keep(keep: object, name: str = "keep") -> None:
    """Raises CheckpointError if `keep` is no number of checkpoints, nor None."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"{name} must be an integer from 1 on, or None, got {keep!r}.")


class NewCheckpoint:
    """A checkpoint that is being written, in a folder that this process holds until it is complete.

    Attributes:
        path: the folder.
        is_complete: whether it has its manifest, and so stays whatever comes.
    """

    def __init__(self, path: str, step: int, release: Callable[[], None]) -> None:
        self.path, self.is_complete = path, False
        self._step, self._release = step, release

    def complete(self, manifest: Mapping[str, object], keep: int | None = None) -> str:
        """Makes it the latest complete checkpoint, when its files are there. Returns its folder, which was
        renamed if one that was begun later was completed before.

        Args:
            keep: how many whole checkpoints stay, this one among them; None: all. Earlier ones go, damaged
                ones among them; those that somebody reads, or that cannot be removed, stay for now.

        Raises:
            OSError: it is not complete.
        """
        write_json_sealed(os.path.join(self.path, NEXT), manifest)
        sync_folder(self.path)
        root = os.path.dirname(self.path)
        with held(os.path.realpath(root), fcntl.LOCK_EX):
            earlier = complete_in(root)
            last = max(map(order_of, earlier), default=(-1, -1))
            if last > order_of(self.path):
                self._rename_behind_all()
            os.replace(os.path.join(self.path, NEXT), os.path.join(self.path, MANIFEST))
            sync_folder(self.path)
            sync_folder(root)
            self.is_complete = True
            self._release()  # before another process completes one, which removes this
            if keep is not None:
                self._remove_earlier(earlier, keep)
            is_shared = last > _last_seen[os.path.realpath(root)]
            _last_seen[os.path.realpath(root)] = order_of(self.path)
        if is_shared:
            warnings.warn(
                f"Another process saves checkpoints into {root}, too. keep= counts and removes those of "
                "both, and the latest may be of either. Give each run a folder of its own.",
                stacklevel=3,
            )
        return self.path

    def _rename_behind_all(self) -> None:
        root, before = os.path.split(self.path)
        while before == os.path.basename(self.path):
            path = os.path.join(root, name_after(os.listdir(root), self._step))
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)  # no other takes the name from here on
                os.rename(self.path, path)
                self.path = path

    def _remove_earlier(self, earlier: list[str], keep: int) -> None:
        with contextlib.suppress(OSError):
            chains = Chains()
            if chains.fault(self.path):
                return  # it may be that only earlier ones are whole
            to_keep, needed = keep - 1, chains.bases(self.path)
            for renamed in {*complete_folders(os.path.dirname(self.path))} - {*earlier}:
                needed |= chains.bases(renamed)
            for folder in reversed(earlier):  # bases come before what was made from them
                if not to_keep and folder not in needed:
                    _remove_unheld(folder)
                elif to_keep and not chains.fault(folder):
                    to_keep -= 1
                if os.path.lexists(os.path.join(folder, MANIFEST)):
                    needed |= chains.bases(folder)


_last_seen: dict[str, tuple[int, int]] = {}
"""By the folder of a run, the `order_of` the latest complete checkpoint that this process has saved there,
or found there before."""


@contextlib.contextmanager
def new_folder(root: str, step: int) -> Iterator[NewCheckpoint]:
    """For a ``with`` statement: a checkpoint of a step, its folder empty, which is gone again if that
    fails before it is complete.

    Raises:
        CheckpointError: `root` is a checkpoint.
        OSError: it cannot be made.
    """
    made = False
    while True:
        made |= made_to_stay(os.path.abspath(root))
        if is_complete(root):
            raise CheckpointError(
                f"{root} is a checkpoint itself. Name the folder that it lies in."
            )
        folder = ""
        with contextlib.ExitStack() as stack:
            try:
                with held(os.path.realpath(root), fcntl.LOCK_EX):
                    folder = os.path.join(root, name_after(os.listdir(root), step))
                    os.mkdir(folder)
                    there = stack.enter_context(held(folder, fcntl.LOCK_EX))
                    last = max(map(order_of, complete_in(root)), default=(-1, -1))
                    _last_seen.setdefault(os.path.realpath(root), last)
            except (FileExistsError, FileNotFoundError):
                continue
            except OSError:
                for empty in [folder, root] if made else [folder]:
                    with contextlib.suppress(OSError):
                        os.rmdir(empty)
                raise
            if not there:  # somebody took it for what a dead process has left
                continue
            new = NewCheckpoint(folder, step, stack.close)
            try:
                yield new
            except BaseException:
                if not new.is_complete:
                    with contextlib.suppress(OSError):
                        _remove(new.path)
                        if made:
                            os.rmdir(root)
                raise
            return


def sweep(root: str) -> None:
    """Removes what processes that died have left of checkpoints."""
    # While nobody completes one: it takes another name, under which nobody holds it for a moment.
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        held(os.path.realpath(root), fcntl.LOCK_EX),
    ):
        for folder in folders_in(root):
            if not os.path.lexists(os.path.join(folder, MANIFEST)):
                _remove_unheld(folder, unless_complete=True)


def _remove_unheld(folder: str, *, unless_complete: bool = False) -> None:
    with (
        contextlib.suppress(OSError),
        held(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as there,
    ):
        if there and not (unless_complete and os.path.lexists(os.path.join(folder, MANIFEST))):
            _remove(folder)


def _remove(folder: str) -> None:
    """Removes what is Hotbed's in it, the manifest first, and the folder if nothing else is there."""
    manifest = os.path.join(folder, MANIFEST)
    if os.path.lexists(manifest) and not os.path.isdir(manifest):
        os.unlink(manifest)
        sync_folder(folder)
    remove_others(folder, ())
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def remove_others(folder: str, names: Collection[str]) -> None:
    """Remove what is Hotbed's in the folder of a checkpoint, but for its manifest and the files and folders
    with these names."""
    for name in sorted({*os.listdir(folder)} - {MANIFEST, *names}):
        path = os.path.join(folder, name)
        if LOG.fullmatch(name) and os.path.isdir(path) and not os.path.islink(path):
            _remove_log(path)
        elif OWN.fullmatch(name) and not os.path.isdir(path):
            os.unlink(path)


def _remove_log(folder: str) -> None:
    for name in os.listdir(folder):
        if FILE_OF_LOG.fullmatch(name):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        os.rmdir(folder)
