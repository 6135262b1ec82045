"""A new checkpoint in the folder of a run, and the end of earlier ones."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import cast

from hotbed.checkpoint.chain import Chains
from hotbed.checkpoint.entries import SizedFile
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.files import sealed
from hotbed.checkpoint.folder import (
    complete_folders,
    complete_in,
    folders_in,
    is_complete,
    order_of,
)
from hotbed.checkpoint.stores import NewFolder, Store, store_of

__all__ = ["NewCheckpoint", "check_keep", "check_step", "new_folder", "sweep"]


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

    def __init__(self, store: Store, folder: NewFolder) -> None:
        self.is_complete = False
        self._store, self._folder = store, folder

    @property
    def path(self) -> str:
        return self._folder.path

    def complete(self, manifest: Mapping[str, object], keep: int | None = None) -> str:
        """Makes it the latest complete checkpoint, when its files are there. Returns its folder, which was
        renamed if one that was begun later was completed before.

        Args:
            keep: how many whole checkpoints stay, this one among them; None: all. Earlier ones go, damaged
                ones among them; those that somebody reads, or that cannot be removed, stay for now.

        Raises:
            OSError: it is not complete.
        """
        root = os.path.dirname(self.path)
        files = cast(list[SizedFile], manifest.get("files", []))
        self._folder.prepare(sealed(manifest), files)
        with self._store.alone_in(root):
            earlier = complete_in(root)
            last = max(map(order_of, earlier), default=(-1, -1))
            self._folder.publish(last)
            self.is_complete = True
            self._folder.release()  # before another process completes one, which removes this
            if keep is not None:
                self._remove_earlier(earlier, keep)
            run = self._store.resolved(root)
            is_shared = last > _last_seen[run]
            _last_seen[run] = order_of(self.path)
        if is_shared:
            warnings.warn(
                f"Another process saves checkpoints into {root}, too. keep= counts and removes those of "
                "both, and the latest may be of either. Give each run a folder of its own.",
                stacklevel=3,
            )
        return self.path

    def _remove_earlier(self, earlier: list[str], keep: int) -> None:
        with contextlib.suppress(OSError):
            chains = Chains()
            if chains.fault(self.path):
                return  # it may be that only earlier ones are whole
            to_keep, needed = keep - 1, chains.bases(self.path)
            root = os.path.dirname(self.path)
            known = {*earlier, *complete_folders(root)}
            for renamed in known - {*earlier}:
                needed |= chains.bases(renamed)

            def is_base(folder: str) -> bool:
                later = {*complete_folders(root)} - known
                return any(folder in chains.bases(one) for one in later)

            for folder in reversed(earlier):  # bases come before what was made from them
                if not to_keep and folder not in needed:
                    self._store.remove_unused(folder, unless=functools.partial(is_base, folder))
                elif to_keep and not chains.fault(folder):
                    to_keep -= 1
                if is_complete(folder):
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
    store, made = store_of(root), False
    while True:
        made |= store.make_folder(store.absolute(root))
        if is_complete(root):
            raise CheckpointError(
                f"{root} is a checkpoint itself. Name the folder that it lies in."
            )
        with contextlib.ExitStack() as stack:
            folder: NewFolder | None = None
            try:
                with store.alone_in(root):
                    folder = store.new_folder(root, step)
                    stack.callback(folder.release)
                    last = max(map(order_of, complete_in(root)), default=(-1, -1))
                    _last_seen.setdefault(store.resolved(root), last)
            except (FileExistsError, FileNotFoundError):
                continue
            except OSError:
                for empty in [*([folder.path] if folder else []), *([root] if made else [])]:
                    with contextlib.suppress(OSError):
                        store.remove_empty(empty)
                raise
            if not folder.is_there:  # somebody took it for what a dead process has left
                continue
            new = NewCheckpoint(store, folder)
            try:
                yield new
            except BaseException:
                if not new.is_complete:
                    with contextlib.suppress(OSError):
                        folder.discard()
                        if made:
                            store.remove_empty(root)
                raise
            return


def sweep(root: str) -> None:
    """Removes what processes that died have left of checkpoints."""
    store = store_of(root)
    # While nobody completes one: it takes another name, under which nobody holds it for a moment.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), store.alone_in(root):
        for folder in folders_in(root):
            if not is_complete(folder):
                store.remove_left_over(folder)
