"""Explicit products of features: the cross network of DCN.

Shapes: B samples, D columns, L layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotbed.arrays import is_one_of
from hotbed.errors import InputError, TableError
from hotbed.nn.widths import check_counts
from hotbed.ops.autocast import autocast_dtype
from hotbed.ops.cross import cross_matrix, cross_vector

__all__ = ["CrossInteraction"]


class CrossInteraction(nn.Module):
    """Cross layers: (…, dim) → (…, dim), where layer l multiplies by the input x_0 once more.

    The matrix form, DCN V2 (Wang et al., arXiv:2008.13535), has a matrix a layer::

        x_(l+1) = x_0 * (W_l x_l + b_l) + x_l

    with W_l = U_l V_l of rank `rank`, if one is given. The vector form, DCN (arXiv:1708.05123),
    has a vector a layer, so a layer multiplies all of x_0 by one number::

        x_(l+1) = x_0 (x_l · w_l) + b_l + x_l

    On a CUDA device kernels do it: the vector form's layers together in one pass, the matrix
    form's bias, product with x_0 and sum while a tile of W_l x_l is at hand.

    Args:
        dim: columns of the input.
        layers: number of layers.
        form: "matrix" or "vector".
        rank: of the matrices; None for full ones.
        bias: whether layers add a bias.

    ``weight`` is (L, D) for the vector form, (L, D, D) for the matrix form, (L, D, rank) beside
    ``inner`` (L, rank, D) with a rank; ``bias`` is (L, D) or None. Weights start from
    U(-√(6 / n), √(6 / n)) with n the sum of a matrix's sides (Xavier), and biases from zero.

    Raises:
        TableError: an argument is not positive, or the form is unknown or has no rank.
    """

    def __init__(
        self,
        dim: int,
        layers: int = 3,
        form: str = "matrix",
        *,
        rank: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not is_one_of(form, ("matrix", "vector")):
            raise TableError(f"CrossInteraction: form is {form!r}. Pass 'matrix' or 'vector'.")
        if form == "vector" and rank is not None:
            raise TableError("CrossInteraction: only matrices have a rank. Pass form='matrix'.")
        check_counts("CrossInteraction", dim=dim, layers=layers, rank=1 if rank is None else rank)
        self.dim, self.layers, self.form, self.rank = dim, layers, form, rank
        sides = {"vector": (), "matrix": (rank or dim,)}[form]
        self.weight = nn.Parameter(torch.empty(layers, dim, *sides, device=device, dtype=dtype))
        self.inner = (
            None
            if rank is None
            else nn.Parameter(torch.empty(layers, rank, dim, device=device, dtype=dtype))
        )
        self.bias = (
            nn.Parameter(torch.empty(layers, dim, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the first values anew from torch's generator."""
        for weight in (self.weight, self.inner):
            if weight is not None:
                bound = math.sqrt(6.0 / (sum(weight.shape[1:]) + (weight.dim() == 2)))
                weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, dim) to (…, dim) of autocast's dtype, or of the input's.

        Raises:
            InputError: the input has another number of columns, or another dtype than the weights.
        """
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise InputError(
                f"CrossInteraction: the input has shape {tuple(x.shape)}. Pass (…, {self.dim})."
            )
        dtype = autocast_dtype(x, x.dtype)
        # Weights of float32 serve an input of fewer bits where autocast made it.
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InputError(
                f"CrossInteraction: the input is {x.dtype} and the weights are {self.weight.dtype}. "
                "Cast one of them, or use torch.autocast."
            )
        x0_BD = x.to(dtype).reshape(-1, self.dim)
        # What is computed below is in chosen dtypes already.
        with torch.autocast(x.device.type, enabled=False):
            out_BD = self._vector(x0_BD) if self.form == "vector" else self._matrix(x0_BD)
        return out_BD.reshape(x.shape)

    def _vector(self, x0_BD: Tensor) -> Tensor:
        bias = torch.zeros_like(self.weight) if self.bias is None else self.bias
        return cross_vector(x0_BD, self.weight, bias)

    def _matrix(self, x0_BD: Tensor) -> Tensor:
        x_BD, dtype = x0_BD, x0_BD.dtype
        # Taken apart at once: the gradient of `weight[layer]` would be as large as that of all layers.
        weights, inner = self.weight.unbind(), () if self.inner is None else self.inner.unbind()
        biases = [x_BD.new_zeros(self.dim)] * self.layers if self.bias is None else self.bias
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            factor = functional.linear(x_BD, inner[layer].to(dtype)) if inner else x_BD
            x_BD = cross_matrix(x0_BD, x_BD, factor, weight.to(dtype), bias.to(dtype))
        return x_BD

    def extra_repr(self) -> str:
        rank = "" if self.rank is None else f", rank={self.rank}"
        return (
            f"{self.dim}, layers={self.layers}, form={self.form!r}{rank}, "
            f"bias={self.bias is not None}"
        )
