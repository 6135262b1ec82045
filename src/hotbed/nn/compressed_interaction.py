"""Compressed interactions of vectors: the network of xDeepFM.

Shapes: B samples, F vectors of d columns, H maps of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hotbed.errors import InputError
from hotbed.nn.factorization import stacked
from hotbed.nn.widths import check_counts, check_layers

__all__ = ["CompressedInteraction"]


class CompressedInteraction(nn.Module):
    """Layers of products of vectors, column by column: F × (B, d) → (B, sum of `layers`).

    Map h of layer k is ``x^k_h = Σ_{i,j} W^k_{h,i,j} (x^(k-1)_i ∘ x^0_j)``, with x^0 the vectors; the output
    has the sum over columns of every map of every layer (Lian et al., arXiv:1803.05170, equations 6 and 8,
    without an activation).

    Args:
        vectors: F.
        layers: number of maps of each layer.

    ``maps[k].weight`` is W^k, (H_k, H_(k-1) · F); its first values are those of a linear layer.

    Raises:
        TableError: an argument is not positive.
    """

    def __init__(self, vectors: int, layers: Sequence[int] = (16, 16, 16)) -> None:
        super().__init__()
        check_counts("CompressedInteraction", vectors=vectors)
        check_layers("CompressedInteraction", layers)
        self.vectors, self.layers = vectors, tuple(layers)
        before = (vectors, *self.layers[:-1])
        self.maps = nn.ModuleList(
            nn.Linear(above * vectors, maps, bias=False)
            for above, maps in zip(before, self.layers, strict=True)
        )

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return sum(self.layers)

    def forward(self, vectors: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
        """Return (B, sum of `layers`).

        Args:
            vectors: a sequence or mapping of F tensors (B, d), or one tensor (B, F, d).

        Raises:
            InputError: the shapes do not fit together, or there are not F vectors.
        """
        every = stacked("CompressedInteraction", vectors)
        if every.shape[1] != self.vectors:
            raise InputError(
                f"CompressedInteraction: there are {every.shape[1]} vectors. Pass {self.vectors}, for "
                "which it was made."
            )
        columns = every.transpose(1, 2).contiguous()  # (B, d, F)
        x, sums = columns, []
        for maps, count in zip(self.maps, self.layers, strict=True):
            weight = maps.weight
            assert isinstance(weight, Tensor)
            # Σ_i x_i Σ_j W_hij x^0_j: the inner sums first, as they are fewer than the products.
            inner = linear(columns, weight.view(-1, self.vectors))
            inner = inner.view(*inner.shape[:2], count, x.shape[2])
            x = (inner * x.unsqueeze(2)).sum(3)  # (B, d, H)
            sums.append(x.sum(1))
        return torch.cat(sums, 1)
