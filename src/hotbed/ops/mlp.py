"""Linear layers that ReLU and dropout follow, by GPU kernels, as one node of a graph.

Shapes: M rows; layer l maps N_(l-1) columns to N_l.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hotbed.ops.gpu.variants import on_gpu, runs_on
from hotbed.ops.operation import Context, operation

__all__ = ["has_kernels", "relu_layers"]


def has_kernels(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether `relu_layers` can take these: on a CUDA device, of one dtype that kernels know."""
    return on_gpu(x) and all(w.dtype == x.dtype and w.device == x.device for w in weights)


def relu_layers(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    dropout: float = 0.0,
    dropped: int = 0,
) -> Tensor:
    """dropout(relu(x @ W_1.T + b_1)), and so on for all layers.

    For the backward it keeps each layer's output and one bit an element. The backward is not
    differentiable again.

    Args:
        x: (M, N_0) float32, float16 or bfloat16, on a CUDA device.
        weights: (N_l, N_(l-1)) of the same dtype, one a layer.
        biases: (N_l,), one a layer.
        dropout: the share of values set to zero, the others being scaled by 1 / (1 - dropout).
        dropped: how many layers, from the first, have dropout. Its random numbers are torch's:
            ``torch.manual_seed`` and checkpointing govern them.

    Returns:
        (M, N_L) of the dtype of `x`.
    """
    dropped = dropped if dropout else 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (dropped,), dtype=torch.int64, device=x.device)
    out: Tensor = layers_op(x, list(weights), list(biases), seeds, dropout)[len(weights) - 1]
    return out


@operation("relu_layers")
def layers_op(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], seeds: Tensor, dropout: float
) -> list[Tensor]:
    """The layers' outputs, then their bits (M, ⌈N_l / 8⌉). The first len(seeds) have dropout."""
    from hotbed.ops.gpu import masks, mlp, products

    outputs, bits = [], []
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        seed = seeds[layer : layer + 1] if layer < len(seeds) else None
        if runs_on(x) and products.tensor_cores(x):
            x, weight = _padded(x), _padded(weight)
        if runs_on(x) and products.fits(x, weight) and weight.shape[0] % 16 == 0:
            x, mask = mlp.linear(x, weight, bias.contiguous(), seed, dropout)
        else:
            x = functional.linear(x, weight, bias)
            mask = masks.finish(x, seed, dropout)
        outputs.append(x)
        bits.append(mask)
    return outputs + bits


def _padded(matrix: Tensor) -> Tensor:
    """The matrix with rows that begin at multiples of 16 elements, zeros in the added columns.

    A copy costs a batch less than a product of rows that tensor cores cannot be fed from, which
    DLRM's 479 columns would be.
    """
    missing = -matrix.shape[1] % 16
    return functional.pad(matrix, (0, missing)) if missing else matrix.contiguous()


@layers_op.register_fake
def _(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], seeds: Tensor, dropout: float
) -> list[Tensor]:
    outputs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    bits = [
        x.new_empty(x.shape[0], (weight.shape[0] + 7) // 8, dtype=torch.uint8) for weight in weights
    ]
    return outputs + bits


@operation("relu_layers_backward")
def layers_backward_op(
    gradient: Tensor,
    x: Tensor,
    weights: list[Tensor],
    saved: list[Tensor],
    dropped: int,
    dropout: float,
    input_needs_it: bool,
) -> list[Tensor]:
    """The gradients of x (empty unless it needs one), of the weights, of the biases (float32)."""
    from hotbed.ops.gpu import masks, mlp, products

    last = len(weights) - 1
    inputs, bits = [x, *saved[:last]], saved[last + 1 :]
    padding = runs_on(x) and products.tensor_cores(x)
    to_weights, to_biases = list(weights), list(weights)
    share = dropout if last < dropped else 0.0
    gradient, to_biases[last] = masks.masked(gradient.contiguous(), bits[last], share)
    for layer in range(last, -1, -1):
        factor = _padded(inputs[layer]) if padding else inputs[layer]
        to_weight = gradient.t() @ factor
        to_weights[layer] = to_weight[:, : weights[layer].shape[1]].contiguous()
        if layer == 0:
            break
        weight, share = weights[layer].contiguous(), dropout if layer - 1 < dropped else 0.0
        if runs_on(x) and products.fits(gradient, weight):
            gradient, to_biases[layer - 1] = mlp.masked_product(
                gradient, weight, bits[layer - 1], share
            )
        else:
            gradient, to_biases[layer - 1] = masks.masked(gradient @ weight, bits[layer - 1], share)
    to_x = _input_gradient(x) if input_needs_it else x.new_empty(0)
    if input_needs_it:
        weight = _padded(weights[0]) if padding else weights[0]
        torch.mm(gradient, weight, out=_first_columns(to_x, weight.shape[1]))
    return [to_x, *to_weights, *to_biases]


def _input_gradient(x: Tensor) -> Tensor:
    """An undefined tensor of the shape of `x`, whose rows begin at multiples of 16 elements."""
    return x.new_empty(x.shape[0], x.shape[1] + -x.shape[1] % 16)[:, : x.shape[1]]


def _first_columns(padded: Tensor, columns: int) -> Tensor:
    """So many columns of a tensor made by `_input_gradient`, up to the added ones."""
    return padded.as_strided((padded.shape[0], columns), padded.stride())


@layers_backward_op.register_fake
def _(
    gradient: Tensor,
    x: Tensor,
    weights: list[Tensor],
    saved: list[Tensor],
    dropped: int,
    dropout: float,
    input_needs_it: bool,
) -> list[Tensor]:
    to_x = _input_gradient(x) if input_needs_it else x.new_empty(0)
    to_weights = [weight.new_empty(weight.shape) for weight in weights]
    to_biases = [weight.new_empty(weight.shape[0], dtype=torch.float32) for weight in weights]
    return [to_x, *to_weights, *to_biases]


class _Context(Context, Protocol):
    dropout: float
    dropped: int
    count: int
    bias_dtype: torch.dtype


_Inputs = tuple[Tensor, list[Tensor], list[Tensor], list[int], float]
"""x, weights, biases, seeds and dropout."""


def _keep(
    ctx: _Context,
    inputs: tuple[Tensor, list[Tensor], list[Tensor], list[int], float],
    output: list[Tensor],
) -> None:
    x, weights, biases, seeds, ctx.dropout = inputs
    ctx.dropped, ctx.count, ctx.bias_dtype = len(seeds), len(weights), biases[0].dtype
    ctx.save_for_backward(x, *weights, *output)


def _backward(
    ctx: _Context, gradients: list[Tensor | None]
) -> tuple[Tensor | list[Tensor] | list[None] | None, ...]:
    x, *tensors = ctx.saved_tensors
    count = ctx.count
    gradient = gradients[count - 1]
    if gradient is None:
        return None, [None] * count, [None] * count, None, None
    to_x, *others = layers_backward_op(
        gradient,
        x,
        tensors[:count],
        tensors[count:],
        ctx.dropped,
        ctx.dropout,
        ctx.needs_input_grad[0],
    )
    to_biases = [to_bias.to(ctx.bias_dtype) for to_bias in others[count:]]
    return to_x if ctx.needs_input_grad[0] else None, others[:count], to_biases, None, None


layers_op.register_autograd(_backward, setup_context=_keep)
