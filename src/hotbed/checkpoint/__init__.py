"""Checkpoints: one documented format for models, optimizers and runs. docs/format.md describes it."""

from hotbed.checkpoint.files import CheckpointError
from hotbed.checkpoint.loading import Restored, load
from hotbed.checkpoint.saving import Saved, save

__all__ = ["CheckpointError", "Restored", "Saved", "load", "save"]
