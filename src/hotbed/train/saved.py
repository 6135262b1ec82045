"""The folder of --save: one checkpoint, which takes the place of the one before."""

from __future__ import annotations

import os

from torch import nn
from torch.optim import Optimizer

from hotbed.checkpoint import Saved, save
from hotbed.checkpoint.errors import DamagedError
from hotbed.checkpoint.folder import MANIFEST, complete_in, is_complete, is_of_checkpoints
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.ranks import ranks_of
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.values import encoded
from hotbed.modules.owner import tables_of
from hotbed.train.report import OutputError

__all__ = ["Mark", "check_writable_folder", "refuse_other_checkpoints", "save_model"]


def save_model(path: str, model: nn.Module, optimizer: Optimizer, step: int) -> Saved:
    """Writes a model, and what goes on with it needs, beside the one that is there; then that one goes.

    Raises:
        CheckpointError, OSError: it cannot be written; what was there is there.
    """
    ranks = ranks_of(tables_of(model), model)
    with ranks.reporting("a checkpoint"):
        if ranks.rank == 0:
            check_writable_folder(path)
    return save(path, model, optimizer, step=step, loader=_OF_SAVE, keep=1)


class Mark:
    """Marks checkpoints that the next one of the same writer may take the place of."""

    def __init__(self, writer: str, named: str) -> None:
        self.writer, self.named = writer, named

    def state_dict(self) -> dict[str, str]:
        return {"written by": self.writer}

    def is_on(self, checkpoint: str) -> bool:
        """Return True if the checkpoint has this mark, or is gone meanwhile."""
        try:
            loaders = read_manifest(checkpoint)["values"]["loaders"]
        except DamagedError:
            if is_complete(checkpoint):
                raise
            return True  # another run has put its own in its place meanwhile
        return bool(loaders == [encoded(self.state_dict(), "", {})])


_OF_SAVE = Mark("hotbed train --save", "--save")


def refuse_other_checkpoints(path: str, mark: Mark) -> None:
    """Raise OutputError if a folder of checkpoints, of which one is to stay, has others than marked ones.

    Raises:
        OutputError: the path is a file or a checkpoint, or holds one without the mark.
    """
    store = store_of(path)
    if store.is_file(path):
        raise OutputError(f"Cannot save to {path!r}: it is a file. Name a folder.")
    if store.is_there(os.path.join(path, MANIFEST)):
        raise OutputError(f"Cannot save to {path!r}: it is a checkpoint. Name another folder.")
    if not all(map(mark.is_on, complete_in(path))):
        raise OutputError(
            f"Cannot save to {path!r}: it holds checkpoints that {mark.named} has not written. Name another "
            "folder."
        )


def check_writable_folder(path: str) -> None:
    """Raises OutputError if a model cannot be saved at `path`, or something would be lost by it.

    A folder that is there must be empty or hold a saved model. Of other files beside it nothing is
    touched.
    """
    store = store_of(path)
    if store.is_file(path):
        raise OutputError(f"Cannot save to {path!r}: it is a file.")
    try:
        if store.is_folder(path):
            refuse_other_checkpoints(path, _OF_SAVE)
            others = not all(is_of_checkpoints(name) for name in store.names_in(path))
            if others and not complete_in(path):
                raise OutputError(
                    f"Cannot save to {path!r}: the folder holds other files. Name a new folder."
                )
        store.try_writing(path)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"Cannot save to {path!r}: {error.strerror}.") from None
