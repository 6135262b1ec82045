"""Gradient clipping over tables and dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hotbed.gradients import norm_of_rows
from hotbed.handles import live_table

__all__ = ["clip_grad_norm_"]


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
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    norm_type = float(norm_type)
    values: list[Tensor] = []
    kinds: list[Callable[[Tensor, float], Tensor]] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            if (live := live_table(parameter)) is None:
                parameter.grad = grad = grad.coalesce()
            else:
                grad = live.waiting.look(parameter, each_once=True)
                assert grad is not None
            grad = grad._values()
            kinds.append(norm_of_rows)
        else:
            kinds.append(torch.linalg.vector_norm)
        values.append(grad)
    if not values:
        return torch.tensor(0.0)
    device = values[0].device
    norms = [
        norm(v, norm_type).to(device) for v, norm in zip(values, kinds, strict=True) if v.numel()
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
    for value in values:
        value.mul_(factor.to(device=value.device, dtype=value.dtype))
    return total
