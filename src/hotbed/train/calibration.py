"""Calibration: how often what was predicted happens."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["calibration"]


def calibration(logits: Tensor, labels: Tensor, bins: int = 15) -> list[dict[str, float]]:
    """Return bins of about as many samples each, by rising probability.

    Args:
        logits: (N,) log odds of label 1; samples whose score or label is not finite are left out.
        labels: (N,) of 0 and 1.
        bins: at most so many; equal scores may lie in two.

    Returns:
        By bin: ``samples``, the mean probability ``predicted``, and the share of positives ``observed``.
    """
    z, y = logits.double().reshape(-1), labels.double().reshape(-1)
    there = torch.isfinite(z) & torch.isfinite(y)
    probability, order = torch.sigmoid(z[there]).sort(stable=True)
    y = y[there][order]
    parts = zip(torch.tensor_split(probability, bins), torch.tensor_split(y, bins), strict=True)
    return [
        {"samples": len(p), "predicted": float(p.mean()), "observed": float(own.mean())}
        for p, own in parts
        if len(p)
    ]
