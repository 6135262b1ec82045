"""Gradients of rows that come and go, or that ranks share: over slots, which are no ids."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hotbed.errors import TableError
from hotbed.tables import MAX_DIM

__all__ = ["FUNCTIONS_BY_ID", "OPEN_ROWS"]

OPEN_ROWS = 2**59 // MAX_DIM
"""Rows that the handle of a table without a plane of its own, and its gradient, claim to have: more than can
be, and few enough that the count of bytes stays below 2**63 for any dim."""


def _checked(func: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(func)
    def checked(grad: Tensor, *args: object, **kwargs: object) -> object:
        if grad.shape[0] == OPEN_ROWS:
            raise TableError(
                f"{func.__name__} of the gradient of a table whose rows come and go, or are shared by ranks: "
                f"its {grad._nnz()} rows are numbered by slots, which are no ids, so there is no dense form. "
                "Take the rows themselves, grad.coalesce().values(), clip with hotbed.nn.clip_grad_norm_; "
                "for the gradients of single ids look at the vectors of a forward (retain_grad())."
            )
        return func(grad, *args, **kwargs)

    return checked


FUNCTIONS_BY_ID: dict[object, Callable[..., object]] = {
    func: _checked(func)
    for func in (
        *(Tensor.to_dense, Tensor.__getitem__, Tensor.select, torch.select),
        *(Tensor.index_select, torch.index_select),
    )
}
"""Functions that need slots that are ids."""
