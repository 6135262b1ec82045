"""Cross interactions: torch's operations, or GPU kernels, behind one signature.

Shapes: B samples, D columns, L layers, K columns of a factor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hotbed.ops import second_order
from hotbed.ops.gpu.variants import MOST_LAYERS, on_gpu, runs_on
from hotbed.ops.operation import Context, operation

__all__ = ["cross_matrix", "cross_vector"]


def cross_vector(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x_L of x_(l+1) = x_0 (x_l·w_l) + b_l + x_l (Wang et al., arXiv:1708.05123, equation 3).

    By x_l = α_l x_0 + β_l, with a number α a sample and a vector β for all: x_0 is read twice, not
    twice a layer.

    Args:
        x: (B, D), floating point: x_0.
        weight, bias: (L, D), of a dtype at least as wide.

    Returns:
        (B, D) of the dtype of `x`, differentiable.
    """
    betas_LD = torch.cat([torch.zeros_like(bias[:1]), bias.cumsum(0)])
    shift = (betas_LD[:-1] * weight).sum(1)
    if on_gpu(x) and weight.dtype == torch.float32 and len(weight) <= MOST_LAYERS:
        out: Tensor = vector_op(x, weight, shift, betas_LD[-1])[0]
        return out
    return _plain_vector(x, weight, shift, betas_LD[-1])


def cross_matrix(x0: Tensor, x: Tensor, factor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x0 * (factor @ weight.T + bias) + x (Wang et al., arXiv:2008.13535, equations 1 and 2).

    Args:
        x0, x: (B, D), floating point.
        factor: (B, K): x, or x times a narrow matrix.
        weight: (D, K); bias: (D,). All of one dtype.

    Returns:
        (B, D), differentiable.
    """
    if on_gpu(x):
        out: Tensor = matrix_op(x0, x, factor, weight, bias)[0]
        return out
    return _plain_matrix(x0, x, factor, weight, bias)


# --- The vector form as one node of a graph. ---


@operation("cross_vector")
def vector_op(x: Tensor, weight: Tensor, shift: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """α_L x + bias, and the products x·w_l that the backward needs."""
    from hotbed.ops.gpu import cross_vector as kernels

    return kernels.cross_vector(x.contiguous(), weight.contiguous(), shift, bias.contiguous())


@vector_op.register_fake
def _(x: Tensor, weight: Tensor, shift: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    products = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape), products


@operation("cross_vector_backward")
def vector_backward_op(
    gradient: Tensor, x: Tensor, weight: Tensor, shift: Tensor, products: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of every sample's products and of its shifts."""
    from hotbed.ops.gpu import cross_vector as kernels

    return kernels.cross_vector_backward(
        gradient.contiguous(), x.contiguous(), weight.contiguous(), shift, products
    )


@vector_backward_op.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, shift: Tensor, products: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        products.new_empty(products.shape),
        products.new_empty(products.shape),
    )


def _keep_vector(ctx: Context, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _backward_of_vector(
    ctx: Context, gradient: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, shift, bias, products = ctx.saved_tensors
    if gradient is None:
        return None, None, None, None
    if second_order.is_wanted():
        return second_order.differentiable_gradients(
            _plain_vector, (x, weight, shift, bias), gradient
        )
    to_x, to_products, to_shifts = vector_backward_op(gradient, x, weight, shift, products)
    to_weight = to_products.to(x.dtype).t() @ x
    return to_x, to_weight.to(weight.dtype), to_shifts.sum(0), gradient.sum(0, dtype=bias.dtype)


vector_op.register_autograd(_backward_of_vector, setup_context=_keep_vector)


# --- The matrix form as one node of a graph. ---


@operation("cross_matrix")
def matrix_op(
    x0: Tensor, x: Tensor, factor: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """x0 * gate + x, and the gate: factor @ weight.T + bias."""
    from hotbed.ops.gpu import cross_matrix as kernels
    from hotbed.ops.gpu import products

    x0, x, factor, weight = (t.contiguous() for t in (x0, x, factor, weight))
    if runs_on(x) and products.fits(x0, x, factor, weight):
        return kernels.cross_matrix(x0, x, factor, weight, bias.contiguous())
    gate = functional.linear(factor, weight, bias)
    return torch.addcmul(x, x0, gate), gate


@matrix_op.register_fake
def _(x0: Tensor, x: Tensor, factor: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operation("cross_matrix_backward")
def matrix_backward_op(gradient: Tensor, x0: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the gate, of x0 and of the bias."""
    if x0.shape[1] % 16:
        to_gate = gradient * x0
        return to_gate, gradient * gate, to_gate.sum(0, dtype=torch.float32)
    from hotbed.ops.gpu import cross_matrix as kernels

    return kernels.cross_matrix_backward(gradient.contiguous(), x0.contiguous(), gate)


@matrix_backward_op.register_fake
def _(gradient: Tensor, x0: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bias = x0.new_empty(x0.shape[1], dtype=torch.float32)
    return gate.new_empty(gate.shape), x0.new_empty(x0.shape), bias


def _keep_matrix(ctx: Context, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _backward_of_matrix(
    ctx: Context, gradient: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    x0, x, factor, weight, bias, gate = ctx.saved_tensors
    if gradient is None:
        return None, None, None, None, None
    if second_order.is_wanted():
        return second_order.differentiable_gradients(
            _plain_matrix, (x0, x, factor, weight, bias), gradient
        )
    to_gate, to_x0, to_bias = matrix_backward_op(gradient, x0, gate)
    return to_x0, gradient, to_gate @ weight, to_gate.t() @ factor, to_bias.to(bias.dtype)


matrix_op.register_autograd(_backward_of_matrix, setup_context=_keep_matrix)


# --- By torch's operations. ---


def _plain_vector(x: Tensor, weight: Tensor, shift: Tensor, bias: Tensor) -> Tensor:
    wide = x.to(weight.dtype)
    products_BL = wide @ weight.t()
    alpha_B = wide.new_ones(wide.shape[0])
    for layer in range(weight.shape[0]):
        alpha_B = alpha_B + alpha_B * products_BL[:, layer] + shift[layer]
    return torch.addcmul(bias, wide, alpha_B.unsqueeze(1)).to(x.dtype)


def _plain_matrix(x0: Tensor, x: Tensor, factor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(x, x0, functional.linear(factor, weight, bias))
