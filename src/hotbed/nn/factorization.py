"""Products of all pairs of vectors, in linear time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["FactorizationMachine", "stacked"]


class FactorizationMachine(nn.Module):
    """Sum over all pairs of vectors of their dot products: F × (B, d) → (B, 1).

    ``½ Σ_columns ((Σ_f v_f)² - Σ_f v_f²)``, the second-order term of a factorization machine (Rendle,
    "Factorization Machines", 2010, lemma 3.1).
    """

    def forward(self, vectors: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
        """Return (B, 1) sums.

        Args:
            vectors: a sequence or mapping of F tensors (B, d), or one tensor (B, F, d).
        """
        every = stacked(vectors)
        return (every.sum(1).square() - every.square().sum(1)).sum(1, keepdim=True) / 2


def stacked(vectors: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """Return one tensor (B, F, d).

    Args:
        vectors: F tensors (B, d), or one tensor (B, F, d).
    """
    if isinstance(vectors, Tensor):
        return vectors
    return torch.stack([*(vectors.values() if isinstance(vectors, Mapping) else vectors)], 1)
