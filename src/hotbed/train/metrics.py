"""How good scores are: exact figures for evaluation, a cheap one for the progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, SupportsFloat

import numpy as np
import torch
from torch import Tensor

__all__ = ["Auc", "LogLoss", "MeanLoss", "Metric", "RunningAuc", "auc", "logloss"]


class Metric(Protocol):
    """A figure of scores and labels, as torchmetrics has them."""

    def update(self, preds: Tensor, target: Tensor, /) -> None:
        """Add rows: scores and labels, (N,) each."""

    def compute(self) -> SupportsFloat:
        """Return the figure of all rows since the last reset."""

    def reset(self) -> None:
        """Forget all rows."""


class _OverAllRows:
    """Keeps the rows, of which a figure is computed at once."""

    def __init__(self, figure: Callable[[Tensor, Tensor], float]) -> None:
        self._figure = figure
        self._rows: list[tuple[Tensor, Tensor]] = []

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add rows: scores and labels, (N,) each."""
        self._rows.append((preds.detach().cpu().reshape(-1), target.detach().cpu().reshape(-1)))

    def compute(self) -> float:
        """Return the figure of all rows since the last reset; NaN of none."""
        if not self._rows:
            return math.nan
        preds, target = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        return self._figure(preds, target)

    def reset(self) -> None:
        """Forget all rows."""
        self._rows.clear()


class Auc(_OverAllRows):
    """Area under the ROC curve of all rows, exact; see `auc`."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(auc)


class LogLoss(_OverAllRows):
    """Mean negative log likelihood of all rows by their logits, in nats; see `logloss`."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(logloss)


class MeanLoss(_OverAllRows):
    """A loss function's value over all rows, in float64.

    Args:
        loss: of scores and labels, (N,) each, to a scalar.
    """

    higher_is_better = False

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(lambda preds, target: float(loss(preds.double(), target.double())))


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve: how often a positive scores above a negative, ties half.

    Exact, by ranks (Mann and Whitney, 1947). NaN if there is only one class, or a score is NaN.

    Args:
        scores: (N,) of any real dtype, larger for likelier positives.
        labels: (N,) of 0 and 1.

    Raises:
        ValueError: there are more of one than of the other.
    """
    _check_sizes("scores", scores, labels)
    score = scores.detach().cpu().double().numpy().ravel()
    positive = labels.detach().cpu().numpy().ravel() > 0.5
    if np.isnan(score).any():
        return math.nan
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of each distinct score
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return math.nan
    above = rank[inverse[positive]].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def logloss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean negative log likelihood, in nats, in float64. NaN of no rows.

    Args:
        logits: (N,) log odds of label 1.
        labels: (N,) of 0 and 1.

    Raises:
        ValueError: there are more of one than of the other.
    """
    _check_sizes("logits", logits, labels)
    z, y = (each.detach().cpu().double().reshape(-1) for each in (logits, labels))
    if not len(z):
        return math.nan
    return float(torch.nn.functional.binary_cross_entropy_with_logits(z, y))


def _check_sizes(what: str, scores: torch.Tensor, labels: torch.Tensor) -> None:
    if scores.numel() != labels.numel():
        raise ValueError(
            f"Expected as many {what} as labels; got {tuple(scores.shape)} and {tuple(labels.shape)}."
        )


class RunningAuc:
    """The AUC of recent rows, to within the width of a histogram bin of the probability.

    Older batches fade: their counts are multiplied by `keep` at each update.
    """

    def __init__(self, bins: int = 1024, keep: float = 0.99) -> None:
        self.bins = bins
        self.keep = keep
        self._counts = torch.zeros(2, bins, dtype=torch.float64, device="cpu")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add rows: logits and labels, (N,) each; a label that is NaN is missing."""
        there = ~torch.isnan(labels)
        logits, labels = logits[there], labels[there]
        bins = (torch.sigmoid(logits.detach().float()) * self.bins).long()
        cell = bins.clamp_(0, self.bins - 1) + (labels > 0.5).long() * self.bins
        counts = torch.bincount(cell.cpu(), minlength=2 * self.bins)
        self._counts.mul_(self.keep).add_(counts.view(2, self.bins))

    def value(self) -> float:
        """NaN until both classes have been seen."""
        negative, positive = self._counts
        pairs = float(negative.sum() * positive.sum())
        if pairs == 0:
            return math.nan
        below = negative.cumsum(0) - negative / 2
        return float((positive * below).sum()) / pairs
