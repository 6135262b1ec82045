"""Answers that are to be those of something else."""

from __future__ import annotations

from torch import Tensor

__all__ = ["TOLERANCE", "apart"]

TOLERANCE = 1e-5
"""Between answers in float32, as of `apart`."""


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, over 1 or the largest number expected; nan where shapes differ."""
    if found.shape != expected.shape:
        return float("nan")
    one, other = (each.detach().cpu().double() for each in (found, expected))
    if not one.numel():
        return 0.0
    return float((one - other).abs().max()) / max(1.0, float(other.abs().max()))
