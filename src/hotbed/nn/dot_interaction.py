"""Pairwise dot products of a sample's vectors.

Shapes: B samples, F vectors beside the dense one, d columns each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotbed.errors import InputError
from hotbed.nn.concat import concat
from hotbed.ops.autocast import autocast_dtype
from hotbed.ops.dot import interact

__all__ = ["DotInteraction"]


class DotInteraction(nn.Module):
    """The interaction of DLRM: the dense vector, followed by the dot products of all pairs.

    With x_0 the dense vector and x_1 … x_F the others, the output of a sample is
    ``[x_0, x_1·x_0, x_2·x_0, x_2·x_1, x_3·x_0, …, x_F·x_(F-1)]``: the strict lower triangle of
    the matrix of products, row by row (Naumov et al., "Deep Learning Recommendation Model for
    Personalization and Recommendation Systems", 2019). With ``self_interaction`` the diagonal
    belongs to the triangle.

    On a CUDA device one kernel does it, without writing the matrix down, for at most 63 vectors of
    float32, float16 or bfloat16. Under autocast, vectors are taken in its dtype.

    Args:
        self_interaction: also take every vector's product with itself.
    """

    def __init__(self, self_interaction: bool = False) -> None:
        super().__init__()
        self.self_interaction = self_interaction

    def out_features(self, vectors: int, dim: int) -> int:
        """Columns of the output for F = ``vectors`` vectors beside the dense one."""
        return dim + (vectors + 1) * (vectors + (2 if self.self_interaction else 0)) // 2

    def forward(
        self, dense: Tensor, vectors: Tensor | Mapping[str, Tensor] | Sequence[Tensor]
    ) -> Tensor:
        """Interacts ``dense`` (B, d) with F vectors.

        Args:
            dense: (B, d), floating point.
            vectors: a sequence or mapping of F tensors (B, d), or one tensor (B, F, d).
                Neighbouring columns of one buffer are read where they are.

        Returns:
            (B, d + F(F+1)/2), or (B, d + (F+1)(F+2)/2) with ``self_interaction``.

        Raises:
            InputError: the shapes do not fit together.
        """
        if dense.dim() != 2:
            raise InputError(
                f"DotInteraction: the dense vector has shape {tuple(dense.shape)}. Pass (B, d)."
            )
        vectors_BFd = _stacked(dense, vectors)
        dtype = autocast_dtype(dense, torch.promote_types(dense.dtype, vectors_BFd.dtype))
        return interact(dense.to(dtype), vectors_BFd.to(dtype), self.self_interaction)

    def extra_repr(self) -> str:
        return f"self_interaction={self.self_interaction}"


def _stacked(dense: Tensor, vectors: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    batch, dim = dense.shape
    if isinstance(vectors, Tensor):
        if vectors.dim() != 3 or vectors.shape[0] != batch or vectors.shape[2] != dim:
            raise InputError(
                f"DotInteraction: the stacked vectors have shape {tuple(vectors.shape)}, and the "
                f"dense vector {tuple(dense.shape)}. Pass ({batch}, F, {dim})."
            )
        return vectors
    named = vectors.items() if isinstance(vectors, Mapping) else enumerate(vectors)
    for name, vector in named:
        if vector.shape != dense.shape:
            raise InputError(
                f"DotInteraction: vector {name!r} has shape {tuple(vector.shape)}, and the dense "
                f"vector {tuple(dense.shape)}. Give every table the dim {dim}."
            )
    if len(vectors) == 0:
        return dense.new_empty(batch, 0, dim)
    return concat(vectors).reshape(batch, len(vectors), dim)
