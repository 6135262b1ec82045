"""Checkpoints: one documented format for models, optimizers and runs. docs/format.md describes it."""

from hotbed.checkpoint.files import CheckpointError, DamagedError
from hotbed.checkpoint.folder import latest
from hotbed.checkpoint.listing import Checkpoint, list
from hotbed.checkpoint.loading import Restored, load, load_model
from hotbed.checkpoint.saving import Saved, save
from hotbed.checkpoint.single import Chunk, contains, read, write

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Chunk",
    "DamagedError",
    "Restored",
    "Saved",
    "contains",
    "latest",
    "list",
    "load",
    "load_model",
    "read",
    "save",
    "write",
]
