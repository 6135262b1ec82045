"""The dot interaction: torch's products, or the GPU kernel, behind one signature.

Shapes: B samples, F vectors beside the dense one, N = F + 1 vectors in all, d columns each,
P pairs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from hotbed.ops.blocks import empty
from hotbed.ops.gpu.variants import MOST_VECTORS, on_gpu, runs_on
from hotbed.ops.operation import Context, operation

__all__ = ["interact"]

# Samples that are worked on at a time on a CPU: their vectors and products stay in the cache and
# in memory that is used again, which halved the forward time of 8192 samples of 27 × 64.
_CHUNK = 512


def interact(dense: Tensor, vectors_BFd: Tensor, self_interaction: bool) -> Tensor:
    """``[x_0, x_1·x_0, x_2·x_0, x_2·x_1, …]`` of each sample; see `hotbed.nn.DotInteraction`.

    Args:
        dense: (B, d), floating point: x_0.
        vectors_BFd: (B, F, d) of the same dtype.
        self_interaction: whether the products of a vector with itself belong to the output.

    Returns:
        (B, d + P), differentiable; twice, outside of compiled graphs of the GPU kernel.
    """
    if torch.compiler.is_compiling():
        if _has_kernel(dense, vectors_BFd):
            compiled: Tensor = interact_op(dense, vectors_BFd, self_interaction)
            return compiled
        return _plain(dense, vectors_BFd, self_interaction)
    out: Tensor = _Interact.apply(  # type: ignore[no-untyped-call]
        dense, vectors_BFd, self_interaction
    )
    return out


def _has_kernel(dense: Tensor, vectors_BFd: Tensor) -> bool:
    return on_gpu(dense) and vectors_BFd.shape[1] < MOST_VECTORS


class _Context(Context, Protocol):
    self_interaction: bool


class _Interact(torch.autograd.Function):
    """`_plain` without keeping the joined vectors and their products for the backward pass."""

    @staticmethod
    def forward(
        ctx: _Context, dense: Tensor, vectors_BFd: Tensor, self_interaction: bool
    ) -> Tensor:
        ctx.save_for_backward(dense, vectors_BFd)
        ctx.self_interaction = self_interaction
        if _has_kernel(dense, vectors_BFd) and runs_on(dense):
            from hotbed.ops.gpu import dot

            return dot.interact(dense, vectors_BFd, self_interaction)
        return _chunked(dense, vectors_BFd, self_interaction)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        dense, vectors_BFd = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself is to be differentiated
            count, dim = vectors_BFd.shape[1] + 1, dense.shape[1]
            all_BNd = torch.cat([dense.unsqueeze(1), vectors_BFd], 1)
            matrix_BNN = _pair_gradients(gradient, count, dim, ctx.self_interaction)
            gradient_BNd = torch.bmm(matrix_BNN, all_BNd)
            return gradient_BNd[:, 0] + gradient[:, :dim], gradient_BNd[:, 1:], None
        if _has_kernel(dense, vectors_BFd) and runs_on(dense):
            from hotbed.ops.gpu import dot

            return *dot.interact_backward(gradient, dense, vectors_BFd, ctx.self_interaction), None
        return *_chunked_backward(gradient, dense, vectors_BFd, ctx.self_interaction), None


# --- For compiled graphs: the kernels as operations that torch knows the shapes of. ---


@operation("interact")
def interact_op(dense: Tensor, vectors_BFd: Tensor, self_interaction: bool) -> Tensor:
    """`interact` as one node of a graph."""
    if not runs_on(dense):
        return _chunked(dense, vectors_BFd, self_interaction)
    from hotbed.ops.gpu import dot

    return dot.interact(dense, vectors_BFd, self_interaction)


@interact_op.register_fake
def _(dense: Tensor, vectors_BFd: Tensor, self_interaction: bool) -> Tensor:
    count = vectors_BFd.shape[1] + 1
    pairs = count * (count - 1 + 2 * self_interaction) // 2
    return dense.new_empty(dense.shape[0], dense.shape[1] + pairs)


@operation("interact_backward")
def interact_backward_op(
    gradient: Tensor, dense: Tensor, vectors_BFd: Tensor, self_interaction: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `dense` and `vectors_BFd` as one node of a graph."""
    if not runs_on(dense):
        # An operation's results may not share memory.
        to_dense, to_vectors = _chunked_backward(gradient, dense, vectors_BFd, self_interaction)
        return to_dense, to_vectors.contiguous()
    from hotbed.ops.gpu import dot

    return dot.interact_backward(gradient, dense, vectors_BFd, self_interaction)


@interact_backward_op.register_fake
def _(
    gradient: Tensor, dense: Tensor, vectors_BFd: Tensor, self_interaction: bool
) -> tuple[Tensor, Tensor]:
    return dense.new_empty(dense.shape), vectors_BFd.new_empty(vectors_BFd.shape)


def _keep(ctx: _Context, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    dense, vectors_BFd, ctx.self_interaction = inputs
    ctx.save_for_backward(dense, vectors_BFd)


def _backward_of_op(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
    dense, vectors_BFd = ctx.saved_tensors
    return *interact_backward_op(gradient, dense, vectors_BFd, ctx.self_interaction), None


interact_op.register_autograd(_backward_of_op, setup_context=_keep)


# --- By torch's products. ---


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


def _plain(dense: Tensor, vectors_BFd: Tensor, self_interaction: bool) -> Tensor:
    all_BNd = torch.cat([dense.unsqueeze(1), vectors_BFd], 1)
    products_BNN = torch.bmm(all_BNd, all_BNd.transpose(1, 2))
    pairs = _pairs(all_BNd.shape[1], self_interaction, dense.device)
    return torch.cat([dense, products_BNN.flatten(1).index_select(1, pairs)], 1)


def _chunked(dense: Tensor, vectors_BFd: Tensor, self_interaction: bool) -> Tensor:
    batch, dim = dense.shape
    pairs = _kept_pairs(vectors_BFd.shape[1] + 1, self_interaction, dense.device)
    out = empty((batch, dim + len(pairs)), dense)
    for part in _chunks(dense):
        all_BNd = torch.cat([dense[part].unsqueeze(1), vectors_BFd[part]], 1)
        products_BNN = torch.bmm(all_BNd, all_BNd.transpose(1, 2))
        chosen = products_BNN.flatten(1).index_select(1, pairs)
        torch.cat([dense[part], chosen.to(dense.dtype)], 1, out=out[part])
    return out


def _chunked_backward(
    gradient: Tensor, dense: Tensor, vectors_BFd: Tensor, self_interaction: bool
) -> tuple[Tensor, Tensor]:
    batch, dim = dense.shape
    count = vectors_BFd.shape[1] + 1
    gradient_BNd = empty((batch, count, dim), dense)
    for part in _chunks(dense):
        all_BNd = torch.cat([dense[part].unsqueeze(1), vectors_BFd[part]], 1)
        matrix_BNN = _pair_gradients(gradient[part], count, dim, self_interaction)
        torch.bmm(matrix_BNN, all_BNd, out=gradient_BNd[part])
    return gradient_BNd[:, 0] + gradient[:, :dim], gradient_BNd[:, 1:]


def _pair_gradients(gradient: Tensor, count: int, dim: int, self_interaction: bool) -> Tensor:
    """(B, d + P) → (B, N, N) such that its product with the vectors is their gradient."""
    cells = _kept_matrix(count, self_interaction, dim, gradient.device)
    matrix_BNN = gradient.index_select(1, cells).view(-1, count, count)
    # x·x has the derivative 2x; without it the diagonal holds another column's gradient.
    diagonal = matrix_BNN.diagonal(dim1=1, dim2=2)
    _ = diagonal.mul_(2) if self_interaction else diagonal.zero_()
    return matrix_BNN


def _chunks(dense: Tensor) -> list[slice]:
    step = _CHUNK if dense.device.type == "cpu" else max(1, dense.shape[0])
    return [slice(begin, begin + step) for begin in range(0, dense.shape[0], step)]
