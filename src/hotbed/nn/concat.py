"""Vectors side by side, without a copy where they already lie so.

Shapes: B samples, D columns of all vectors together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from hotbed.errors import InputError

__all__ = ["concat", "joined_view"]


def concat(vectors: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """Join vectors of shapes (B, d_1), (B, d_2), … into (B, d_1 + d_2 + …), in their order.

    A mapping stands for its values. Equals ``torch.cat(vectors, 1)``. Where the vectors are
    neighbouring columns of one buffer, as an ``EmbeddingCollection`` returns them, the result is
    a view of that buffer: nothing is copied, and autograd refuses to change it in place.

    Raises:
        InputError: there are no vectors, or their shapes do not fit together.
    """
    if isinstance(vectors, Mapping):
        vectors = list(vectors.values())
    if len(vectors) == 0:
        raise InputError("concat: there are no vectors. Pass at least one of shape (B, d).")
    batch = vectors[0].shape[0] if vectors[0].dim() else 0
    for position, vector in enumerate(vectors):
        if vector.dim() != 2 or vector.shape[0] != batch:
            raise InputError(
                f"concat: vector {position} has shape {tuple(vector.shape)}. "
                f"Pass shape (B, d) with the first vector's B = {batch}."
            )
    # A compiled graph has no storages to look at; its compiler removes copies by its own means.
    if not torch.compiler.is_compiling() and joined_view(vectors) is not None:
        joined: Tensor = _Join.apply(*vectors)  # type: ignore[no-untyped-call]
        return joined
    return torch.cat(list(vectors), 1)


def joined_view(columns: Sequence[Tensor]) -> Tensor | None:
    """The one (B, D) view that neighbouring column slices of a buffer make up, or None.

    Slices of shapes (B, d_i) qualify if they share storage and dtype, have strides (S, 1), and
    each begins in the storage where the one before ends. Autograd does not see this view.
    """
    first = columns[0]
    rows, width = first.shape[0], sum(column.shape[1] for column in columns)
    if rows == 0 or width == 0 or first.device.type == "meta":
        return None
    # A tensor of another class (a fake or distributed one) may have no memory of its own.
    if any(type(column) not in (Tensor, torch.nn.Parameter) for column in columns):
        return None
    stride = first.stride(0) if rows > 1 else width
    if stride < width:
        return None
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    for column in columns:
        if (
            column.storage_offset() != offset
            or (column.shape[1] > 1 and column.stride(1) != 1)
            or (rows > 1 and column.stride(0) != stride)
            or column.dtype != first.dtype
            or column.untyped_storage().data_ptr() != storage
        ):
            return None
        offset += column.shape[1]
    return first.detach().as_strided((rows, width), (stride, 1))


class _Context(Protocol):
    ends: list[int]
    """Columns at which slices begin, and the one behind the last."""


class _Join(torch.autograd.Function):
    """Column slices of one buffer → the joined view; its gradient → column slices of it."""

    @staticmethod
    def forward(ctx: _Context, *vectors: Tensor) -> Tensor:
        ctx.ends = [0, *accumulate(vector.shape[1] for vector in vectors)]
        joined = joined_view(vectors)
        assert joined is not None, "concat looked at the same vectors"
        return joined

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, ...]:
        (gradient_BD,) = gradients
        return tuple(gradient_BD[:, begin:end] for begin, end in pairwise(ctx.ends))
