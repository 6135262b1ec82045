"""Products of all pairs of vectors, in linear time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotbed.errors import InputError

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

        Raises:
            InputError: the shapes do not fit together.
        """
        every = stacked("FactorizationMachine", vectors)
        return (every.sum(1).square() - every.square().sum(1)).sum(1, keepdim=True) / 2


def stacked(layer: str, vectors: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """Return one tensor (B, F, d).

    Args:
        layer: name of the layer that asks, for errors.
        vectors: F tensors (B, d), or one tensor (B, F, d).

    Raises:
        InputError: there are none, or their shapes do not fit together.
    """
    if isinstance(vectors, Tensor):
        if vectors.dim() != 3:
            raise InputError(
                f"{layer}: the stacked vectors have shape {tuple(vectors.shape)}. Pass (B, F, d)."
            )
        return vectors
    if len(vectors) == 0:
        raise InputError(f"{layer}: there are no vectors. Pass at least one of shape (B, d).")
    named = dict(vectors.items() if isinstance(vectors, Mapping) else enumerate(vectors))
    first = next(iter(named.values()))
    for name, vector in named.items():
        if vector.dim() != 2 or vector.shape != first.shape:
            raise InputError(
                f"{layer}: vector {name!r} has shape {tuple(vector.shape)}, and the first one "
                f"{tuple(first.shape)}. Pass vectors of the same shape (B, d)."
            )
    return torch.stack([*named.values()], 1)
