"""Checkpoints: one documented format for models, optimizers and runs. docs/format.md describes it."""

from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.folder import latest
from hotbed.checkpoint.listing import Checkpoint, list
from hotbed.checkpoint.loading import Restored, load, load_model, load_too
from hotbed.checkpoint.merging import ChangedRows, Changes, changes, merge
from hotbed.checkpoint.packing import pack
from hotbed.checkpoint.saving import Saved, Saving, save, save_too
from hotbed.checkpoint.single import Chunk, contains, read, write
from hotbed.dist.hosts import CALLS

__all__ = [
    "ChangedRows",
    "Changes",
    "Checkpoint",
    "CheckpointError",
    "Chunk",
    "DamagedError",
    "Restored",
    "Saved",
    "Saving",
    "changes",
    "contains",
    "latest",
    "list",
    "load",
    "load_model",
    "merge",
    "pack",
    "read",
    "save",
    "write",
]

CALLS.update(save=save_too, load=load_too)
