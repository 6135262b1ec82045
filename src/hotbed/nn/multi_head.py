"""Interactions by attention among the vectors of a sample: the layer of AutoInt.

Shapes: B samples, F vectors of d columns, H heads of width w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotbed.nn.factorization import stacked
from hotbed.nn.widths import check_counts

__all__ = ["SelfAttentionInteraction"]


class SelfAttentionInteraction(nn.Module):
    """One layer of attention of each vector to all: F × (B, d) → (B, F, heads · width).

    Head h weighs vector k for vector m by ``softmax_k((Q_h e_m) · (K_h e_k))`` and sums ``V_h e_k``; the
    heads lie side by side, ``R e_m`` is added, and ReLU follows (Song et al., arXiv:1810.11921, equations 5
    to 8).

    Args:
        dim: d.
        heads: H.
        width: w.

    Weights of ``query``, ``key``, ``value`` and ``residual`` are (H · w, d), first values as of a linear
    layer.

    Raises:
        TableError: an argument is not positive.
    """

    def __init__(self, dim: int, heads: int = 2, width: int = 16) -> None:
        super().__init__()
        check_counts("SelfAttentionInteraction", dim=dim, heads=heads, width=width)
        self.heads, self.width = heads, width
        self.query, self.key, self.value, self.residual = (
            nn.Linear(dim, heads * width, bias=False) for _ in range(4)
        )

    @property
    def out_features(self) -> int:
        """Columns of each vector of the output."""
        return self.heads * self.width

    def forward(self, vectors: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
        """Return (B, F, heads · width).

        Args:
            vectors: a sequence or mapping of F tensors (B, d), or one tensor (B, F, d).

        Raises:
            InputError: the shapes do not fit together.
        """
        every = stacked("SelfAttentionInteraction", vectors)
        query, key, value = (
            self._by_head(one(every)) for one in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(2, 3)).softmax(3)  # (B, H, F, F)
        seen = (weights @ value).transpose(1, 2).flatten(2)
        return torch.relu(seen + self.residual(every))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, self.width).transpose(1, 2)
