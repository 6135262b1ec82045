"""Attention of a candidate to the items of a user's history: the local activation unit of DIN.

Shapes: B samples, L items of a history, d columns of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from hotbed.errors import InputError
from hotbed.nn.mlp import MLP
from hotbed.nn.widths import check_counts, check_hidden

__all__ = ["Dice", "TargetAttention"]


class Dice(nn.Module):
    """Data adaptive activation: ``p x + (1 - p) α x`` with ``p = sigmoid(x standardised over the batch)``.

    ``alpha`` (features,) is learned, from 0; means and variances are those of the batch while training,
    running ones afterwards, and for a batch of one sample, which has no variance (Zhou et al.,
    arXiv:1706.06978, equation 8).

    Args:
        features: columns of the input (…, features).
    """

    def __init__(self, features: int, eps: float = 1e-8) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(features))
        self.norm = nn.BatchNorm1d(features, eps=eps, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if self.training and len(rows) == 1:
            norm = self.norm
            standardised = batch_norm(rows, norm.running_mean, norm.running_var, eps=norm.eps)
        else:
            standardised = self.norm(rows)
        gate = torch.sigmoid(standardised.view_as(x))
        return gate * x + (1 - gate) * self.alpha * x


class TargetAttention(nn.Module):
    """Sum of a history's vectors, each weighed by an MLP that sees it beside the candidate: → (B, d).

    The MLP sees the candidate q, the item k, q - k and q · k, and its output is the weight as it is,
    without a softmax, so that a long interest counts more than a short one (arXiv:1706.06978, section 4.3).

    Args:
        dim: d.
        hidden: widths of the MLP's hidden layers; sigmoid follows each.

    Raises:
        TableError: a width is not positive.
    """

    def __init__(self, dim: int, hidden: Sequence[int] = (36,)) -> None:
        super().__init__()
        check_counts("TargetAttention", dim=dim)
        check_hidden("TargetAttention", hidden)
        self.dim = dim
        self.weight = MLP(4 * dim, [*hidden, 1], activation="sigmoid")

    def forward(self, target: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        """Return (B, d).

        Args:
            target: the candidates' vectors, (B, d).
            history: the items' vectors, (B, L, d).
            mask: bool (B, L), True for items, False where a history is shorter than L.

        Raises:
            InputError: the shapes do not fit together.
        """
        if (
            target.dim() != 2
            or target.shape[1] != self.dim
            or history.dim() != 3
            or history.shape[::2] != target.shape
            or mask.shape != history.shape[:2]
        ):
            raise InputError(
                f"TargetAttention: target has shape {tuple(target.shape)}, history {tuple(history.shape)}, "
                f"and mask {tuple(mask.shape)}. Pass (B, {self.dim}), (B, L, {self.dim}) and (B, L)."
            )
        each = target.unsqueeze(1).expand_as(history)
        seen = torch.cat([each, history, each - history, each * history], 2)
        weights = self.weight(seen) * mask.unsqueeze(2)
        total: Tensor = (weights * history).sum(1)
        return total
