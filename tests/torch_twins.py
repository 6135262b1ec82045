"""Helpers of the tests that set Hotbed's modules beside torch's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def dense_grad(parameter: torch.nn.Parameter) -> Tensor:
    """The gradient of a static table, (rows, dim)."""
    assert parameter.grad is not None and parameter.grad.is_sparse
    return parameter.grad.coalesce().to_dense()


def dense_grads(parameters: Iterable[torch.nn.Parameter]) -> list[Tensor]:
    return [dense_grad(p) for p in parameters]
