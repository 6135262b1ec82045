"""Gradients of gradients, for operations whose backward is a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["differentiable_gradients", "is_wanted"]


def is_wanted() -> bool:
    """Whether the backward that runs will itself be differentiated (``create_graph=True``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def differentiable_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of `function`, made of torch's operations, at `inputs`; can be differentiated."""
    # Nodes of their own: one input may be another, or have been computed from it.
    inputs = [x.view_as(x) for x in inputs]
    wanted = [x for x in inputs if x.requires_grad]
    out = function(*inputs)
    found = iter(torch.autograd.grad(out, wanted, gradient, create_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)
