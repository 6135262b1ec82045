"""The checkpoints of a folder, and the state that each is in."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hotbed.checkpoint.chain import Chains
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.folder import OWN, folders_in, is_complete, is_held, order_of, root_of
from hotbed.checkpoint.linked import linked_bytes
from hotbed.checkpoint.manifest import MANIFEST, read_manifest
from hotbed.checkpoint.stores import store_of

__all__ = ["Checkpoint", "list"]


class Checkpoint(NamedTuple):
    """A checkpoint, as far as its manifest and the sizes of its files tell."""

    path: str
    """Folder of the checkpoint."""
    step: int | None
    """Number of steps taken; None: neither its name nor its manifest tells."""
    state: Literal["whole", "damaged", "incomplete", "being written"]
    """``incomplete``: a save that did not end has left it, and the next one removes it."""
    reason: str
    """Reason why it cannot be loaded; empty for a whole one."""
    bytes: int
    """Size of the files that exist, without the manifest and linked ones."""
    when: datetime.datetime
    """Time when it was completed, or else last changed; in UTC."""
    base: str | None = None
    """Folder of the checkpoint since which it holds what has changed; None: it holds all."""
    linked_bytes: int = 0
    """Size of files that are hard links to those of an SSD tier, or were; on the disk."""
    kept_bytes: int = 0
    """Of them, the size of those that only this checkpoint has any more."""


def list(path: str | os.PathLike[str]) -> Sequence[Checkpoint]:
    """List checkpoints in the order in which they were completed.

    `hotbed.load` reads the last complete one. Bytes of rows are not read:
    ``hotbed checkpoint verify --all`` does that.

    Args:
        path: a folder of checkpoints, or one of them. None are in a folder that is not there.

    Raises:
        CheckpointError: what is there cannot be looked at.
        InputError: `path` is no path.
    """
    real = root_of(path)
    real = store_of(real).resolved(real)
    while True:
        try:
            folders = [real] if is_complete(real) else folders_in(real)
            chains = Chains()
            found = [_state_of(folder, chains) for folder in folders]
        except OSError as error:
            where = error.filename or real
            raise CheckpointError(f"{where} cannot be read: {error.strerror}.") from None
        there = [one for one in found if one is not None]
        # Else what was complete was removed just now, as another one is by now.
        if None not in found or any(one.state in ("whole", "damaged") for one in there):
            return there


def _state_of(folder: str, chains: Chains) -> Checkpoint | None:
    """None: it was removed meanwhile."""
    try:
        complete = is_complete(folder)
        last = os.path.join(folder, MANIFEST) if complete else folder
        store = store_of(folder)
        when = datetime.datetime.fromtimestamp(store.changed_at(last), datetime.timezone.utc)
        sizes = store.sizes_in(folder).items()
        size = sum(n for f, n in sizes if OWN.fullmatch(f) and f.endswith(".safetensors"))
        step = order_of(folder)[1]
        if not complete:
            state: Literal["incomplete", "being written"]
            state, reason = "incomplete", "A save that did not end has left it."
            if is_held(folder):
                state, reason = "being written", "It is being written."
            return Checkpoint(folder, step, state, reason, size, when)
        if reason := chains.fault(folder):
            if not is_complete(folder):
                return None
            return Checkpoint(folder, step if step >= 0 else None, "damaged", reason, size, when)
        manifest = read_manifest(folder)
        base = manifest["base"] and os.path.join(os.path.dirname(folder), manifest["base"]["name"])
        linked = linked_bytes(folder, manifest)
        return Checkpoint(folder, manifest["step"], "whole", "", size, when, base, *linked)
    except (FileNotFoundError, DamagedError):
        if is_complete(folder):
            raise
        return None
