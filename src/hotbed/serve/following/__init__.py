"""Versions of a bundle, of the checkpoints of a run."""
