"""Retrieval with the other items of a batch as negatives.

Shapes: B samples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed.errors import InputError, TableError

__all__ = ["FrequencyEstimate", "in_batch_logits", "in_batch_softmax"]


def in_batch_logits(scores: Tensor, items: Tensor, probability: Tensor | None = None) -> Tensor:
    """Return logits (B, B) of each sample's query for the items of all samples.

    The logarithm of an item's probability is subtracted from its column, as frequent items are negatives
    more often than rare ones (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations", RecSys 2019, equation 3). A column whose item is that of the row's own sample is no
    negative: it becomes -inf.

    Args:
        scores: (B, B), row i those of query i for the item of sample j.
        items: int64 (B,), ids of the items.
        probability: (B,), estimated shares of batches that have the item; None: no correction.

    Raises:
        InputError: the shapes do not fit together.
    """
    count = len(items)
    if scores.shape != (count, count) or items.dim() != 1:
        raise InputError(
            f"in_batch_logits: scores have shape {tuple(scores.shape)}, and items {tuple(items.shape)}. Pass "
            "(B, B) and (B,)."
        )
    if probability is not None and probability.shape != items.shape:
        raise InputError(
            f"in_batch_logits: probability has shape {tuple(probability.shape)}. Pass {tuple(items.shape)}."
        )
    if probability is not None:
        scores = scores - probability.log()
    same = items.unsqueeze(0) == items.unsqueeze(1)
    itself = torch.eye(count, dtype=torch.bool, device=items.device)
    return scores.masked_fill(same & ~itself, -torch.inf)


def in_batch_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over positive samples of -log softmax of their own item: (B, B), (B,) → ().

    Args:
        logits: of `in_batch_logits`.
        labels: (B,), weights of the samples; those with 0, or NaN, count nothing.

    Returns:
        0 where no sample counts.

    Raises:
        InputError: the shapes do not fit together.
    """
    count = len(logits)
    if logits.shape != (count, count) or labels.shape != (count,):
        raise InputError(
            f"in_batch_softmax: logits have shape {tuple(logits.shape)}, and labels {tuple(labels.shape)}. "
            "Pass (B, B) and (B,)."
        )
    own = -logits.log_softmax(1).diagonal()
    weights = labels.to(own.dtype).nan_to_num(0.0)
    total: Tensor = (own * weights).sum() / weights.sum().clamp_min(torch.finfo(own.dtype).tiny)
    return total


class FrequencyEstimate(nn.Module):
    """Estimate of the share of batches that an item is in, from the gaps between its batches.

    An item's gap moves by `rate` towards the number of batches since it was last seen (Yi et al., RecSys
    2019, algorithm 2). Items share a cell where their ids are alike modulo `cells`.

    Args:
        cells: number of cells; memory is 12 bytes each.
        rate: weight of the newest gap, in (0, 1].

    Buffers, saved with a model: ``last`` int64 (cells,), ``gap`` float32 (cells,), ``batches`` int64 ().

    Raises:
        TableError: an argument is out of range.
    """

    last: Tensor
    gap: Tensor
    batches: Tensor

    def __init__(self, cells: int = 1 << 20, rate: float = 0.05) -> None:
        super().__init__()
        is_count = isinstance(cells, int) and not isinstance(cells, bool) and cells > 0
        if not is_count or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise TableError(
                f"FrequencyEstimate: cells is {cells!r} and rate {rate!r}. Pass a positive integer and a "
                "number in (0, 1]."
            )
        self.cells, self.rate = cells, rate
        self.register_buffer("last", torch.zeros(cells, dtype=torch.int64))
        self.register_buffer("gap", torch.zeros(cells))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def forward(self, items: Tensor) -> Tensor:
        """Return the estimates, float32 of the shape of `items`; while training the batch is counted first.

        Args:
            items: int64 or int32 ids.

        Raises:
            InputError: the items are of another dtype.
        """
        if items.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"FrequencyEstimate: items are {items.dtype}. Convert them with .long()."
            )
        cells = items.remainder(self.cells)
        if self.training:
            self.batches += 1
            seen = torch.unique(cells)
            since = (self.batches - self.last[seen]).float()
            before = self.gap[seen].float()
            moved = torch.lerp(before, since, self.rate)
            self.gap[seen] = torch.where(before > 0, moved, since).to(self.gap.dtype)
            self.last[seen] = self.batches
        never = self.batches.clamp_min(1).float()
        gap = self.gap[cells].float()
        return torch.where(gap > 0, gap, never).clamp_min(1.0).reciprocal()
