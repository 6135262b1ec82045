"""Pairwise dot products of a sample's vectors.

Shapes: B samples, F vectors beside the dense one, N = F + 1 vectors in all, d columns each,
P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.errors import InputError
from hotbed.nn.concat import concat
from hotbed.ops.blocks import empty

__all__ = ["DotInteraction"]

# Samples that are worked on at a time on a CPU: their vectors and products stay in the cache and
# in memory that is used again, which halved the forward time of 8192 samples of 27 × 64.
_CHUNK = 512


class DotInteraction(nn.Module):
    """The interaction of DLRM: the dense vector, followed by the dot products of all pairs.

    With x_0 the dense vector and x_1 … x_F the others, the output of a sample is
    ``[x_0, x_1·x_0, x_2·x_0, x_2·x_1, x_3·x_0, …, x_F·x_(F-1)]``: the strict lower triangle of
    the matrix of products, row by row (Naumov et al., "Deep Learning Recommendation Model for
    Personalization and Recommendation Systems", 2019). With ``self_interaction`` the diagonal
    belongs to the triangle.

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
        dtype = torch.promote_types(dense.dtype, vectors_BFd.dtype)
        dense, vectors_BFd = dense.to(dtype), vectors_BFd.to(dtype)
        if torch.compiler.is_compiling():
            return _interact(dense, vectors_BFd, self.self_interaction)
        out: Tensor = _Interact.apply(  # type: ignore[no-untyped-call]
            dense, vectors_BFd, self.self_interaction
        )
        return out

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


def _pairs(count: int, self_interaction: bool, device: torch.device) -> Tensor:
    """(P,): where the pairs lie in a flattened (count, count) matrix, row by row."""
    lower = torch.tril_indices(count, count, 0 if self_interaction else -1, device=device)
    return lower[0] * count + lower[1]


@lru_cache(maxsize=64)
def _kept_pairs(count: int, self_interaction: bool, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not serve training later
        pairs = _pairs(count, self_interaction, device)
    return pairs


@lru_cache(maxsize=64)
def _kept_matrix(count: int, self_interaction: bool, dim: int, device: torch.device) -> Tensor:
    """(count²,): for each cell of the symmetric matrix its pair's column of the output.

    The diagonal's cells name column 0 where it is in no pair.
    """
    with torch.inference_mode(False):
        pairs = _pairs(count, self_interaction, device)
        lower = torch.zeros(count * count, dtype=torch.int64, device=device)
        lower[pairs] = torch.arange(dim, dim + len(pairs), device=device)
        lower = lower.view(count, count)
        cells = torch.maximum(lower, lower.T).reshape(-1)
    return cells


def _interact(dense: Tensor, vectors_BFd: Tensor, self_interaction: bool) -> Tensor:
    all_BNd = torch.cat([dense.unsqueeze(1), vectors_BFd], 1)
    products_BNN = torch.bmm(all_BNd, all_BNd.transpose(1, 2))
    pairs = _pairs(all_BNd.shape[1], self_interaction, dense.device)
    return torch.cat([dense, products_BNN.flatten(1).index_select(1, pairs)], 1)


def _pair_gradients(gradient: Tensor, count: int, dim: int, self_interaction: bool) -> Tensor:
    """(B, d + P) → (B, N, N) such that its product with the vectors is their gradient."""
    cells = _kept_matrix(count, self_interaction, dim, gradient.device)
    matrix_BNN = gradient.index_select(1, cells).view(-1, count, count)
    # x·x has the derivative 2x; without it the diagonal holds another column's gradient.
    diagonal = matrix_BNN.diagonal(dim1=1, dim2=2)
    _ = diagonal.mul_(2) if self_interaction else diagonal.zero_()
    return matrix_BNN


class _Interact(torch.autograd.Function):
    """`_interact` without keeping the joined vectors and their products for the backward pass."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, vectors_BFd: Tensor, self_interaction: bool) -> Tensor:
        ctx.save_for_backward(dense, vectors_BFd)
        ctx.self_interaction = self_interaction
        batch, dim = dense.shape
        pairs = _kept_pairs(vectors_BFd.shape[1] + 1, self_interaction, dense.device)
        out = empty((batch, dim + len(pairs)), dense)
        for part in _chunks(dense):
            all_BNd = torch.cat([dense[part].unsqueeze(1), vectors_BFd[part]], 1)
            products_BNN = torch.bmm(all_BNd, all_BNd.transpose(1, 2))
            chosen = products_BNN.flatten(1).index_select(1, pairs)
            torch.cat([dense[part], chosen.to(dense.dtype)], 1, out=out[part])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        dense, vectors_BFd = ctx.saved_tensors
        batch, dim = dense.shape
        count = vectors_BFd.shape[1] + 1
        if torch.is_grad_enabled():  # the gradient itself is to be differentiated
            all_BNd = torch.cat([dense.unsqueeze(1), vectors_BFd], 1)
            matrix_BNN = _pair_gradients(gradient, count, dim, ctx.self_interaction)
            gradient_BNd = torch.bmm(matrix_BNN, all_BNd)
        else:
            gradient_BNd = empty((batch, count, dim), dense)
            for part in _chunks(dense):
                all_BNd = torch.cat([dense[part].unsqueeze(1), vectors_BFd[part]], 1)
                matrix_BNN = _pair_gradients(gradient[part], count, dim, ctx.self_interaction)
                torch.bmm(matrix_BNN, all_BNd, out=gradient_BNd[part])
        return gradient_BNd[:, 0] + gradient[:, :dim], gradient_BNd[:, 1:], None


def _chunks(dense: Tensor) -> list[slice]:
    step = _CHUNK if dense.device.type == "cpu" else max(1, dense.shape[0])
    return [slice(begin, begin + step) for begin in range(0, dense.shape[0], step)]
