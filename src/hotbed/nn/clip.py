"""Gradient clipping over tables and dense parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hotbed.ops.outside_graphs import outside_graphs
from hotbed.table.gradients import norm_of_rows
from hotbed.table.live import live_table

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


@outside_graphs
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients so that their norm, taken together, is at most `max_norm`.

    As ``torch.nn.utils.clip_grad_norm_``, which refuses the sparse gradients of tables. The norm is
    that of the gradient a dense table would have: rows that several backwards added count summed.

    Args:
        parameters: tables (their handles) and dense parameters; those without a gradient are skipped.
        max_norm: the largest norm to leave.
        norm_type: of the p-norm; may be ``float("inf")``.
        error_if_nonfinite: raise where the norm is NaN or infinite.

    Returns:
        The norm before scaling, a scalar.

    Raises:
        RuntimeError: the norm is NaN or infinite and error_if_nonfinite is set; nothing has changed.
    """
    gradients = _gradients(parameters)
    if not gradients:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    device = gradients[0][0].device
    norms = [
        (norm_of_rows if of_rows else torch.linalg.vector_norm)(values, norm_type).to(device)
        for values, of_rows in gradients
        if values.numel()
    ]
    if not norms:
        return torch.tensor(0.0, device=device)
    dtype = max((n.dtype for n in norms), key=lambda d: d.itemsize)
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(dtype) for n in norms]), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The gradients have a norm of {float(total)}, so they cannot be clipped. Pass "
            "error_if_nonfinite=False to scale them by it anyway."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for values, _ in gradients:
        values.mul_(factor.to(device=values.device, dtype=values.dtype))
    return total


@outside_graphs
@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Brings every element of all gradients into [-clip_value, clip_value].

    As ``torch.nn.utils.clip_grad_value_``. Of a table, the elements are those of the gradient that a
    dense table would have: rows that several backwards added are summed first.

    Args:
        parameters: tables (their handles) and dense parameters; those without a gradient are skipped.
        clip_value: the largest magnitude to leave.
    """
    for values, _ in _gradients(parameters):
        values.clamp_(-float(clip_value), float(clip_value))


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[tuple[Tensor, bool]]:
    """What holds the elements of each gradient, and whether these are the rows of a sparse one."""
    found: list[tuple[Tensor, bool]] = []
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        live = live_table(parameter)
        grad = parameter.grad if live is None else live.waiting.look(parameter, each_once=True)
        if grad is None:
            continue
        if grad.is_sparse and live is None:
            parameter.grad = grad = grad.coalesce()
        found.append((grad._values(), True) if grad.is_sparse else (grad, False))
    return found
