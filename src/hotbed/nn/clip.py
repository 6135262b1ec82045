"""Gradient clipping over tables and dense parameters."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import torch
from torch import Tensor

from hotbed.ops.outside_graphs import outside_graphs
from hotbed.table.clipping import ClippingCall, DenseGradient, Gradient
from hotbed.table.live import LiveTable, live_table

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


@outside_graphs
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm, taken together, is at most `max_norm`.

    As ``torch.nn.utils.clip_grad_norm_``, which takes tables of one process only. The norm is
    that of the gradient a dense table would have: rows that several backwards added count summed. Of
    tables that ranks share it is that of the mean over ranks, and all ranks call it.

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
    norm_type = float(norm_type)
    arguments = {
        "max_norm": max_norm,
        "norm_type": norm_type,
        "error_if_nonfinite": error_if_nonfinite,
    }
    gradients = _gradients(parameters, "clip_grad_norm_", arguments)
    found = [(one, one.norm(norm_type)) for one in gradients]
    norms = [norm for _, norm in found if norm is not None]
    if not norms:
        return torch.tensor(0.0, device=gradients[0].device if gradients else None)
    device = gradients[0].device
    dtype = max((n.dtype for n in norms), key=lambda d: d.itemsize)
    stacked = torch.stack([n.to(device=device, dtype=dtype) for n in norms])
    total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The gradients have a norm of {float(total)}, so they cannot be clipped. Pass "
            "error_if_nonfinite=False to scale them by it anyway."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for one in gradients:
        one.scale(factor)
    return total


@outside_graphs
@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Bring every element of all gradients into [-clip_value, clip_value].

    As ``torch.nn.utils.clip_grad_value_``. Of a table, the elements are those of the gradient that a
    dense table would have: rows that several backwards added are summed first.

    Args:
        parameters: tables (their handles) and dense parameters; those without a gradient are skipped.
        clip_value: the largest magnitude to leave.
    """
    limit = float(clip_value)
    for one in _gradients(parameters, "clip_grad_value_", {"clip_value": limit}):
        one.clamp(limit)


def _gradients(
    parameters: Tensor | Iterable[Tensor], function: str, arguments: Mapping[str, object]
) -> list[Gradient]:
    """Return the gradients that there are, in the order of the parameters. `arguments`: of `function`, which
    is to change them."""
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    together: dict[
        Hashable, list[tuple[int, LiveTable]]
    ] = {}  # tables whose gradients come at once
    found: list[Gradient | None] = [None] * len(every)
    for at, parameter in enumerate(every):
        live = live_table(parameter)
        if live is not None:
            together.setdefault(live.place.stepped_with, []).append((at, live))
        elif (grad := parameter.grad) is not None:
            if grad.is_sparse:
                parameter.grad = grad = grad.coalesce()
            found[at] = DenseGradient(grad._values() if grad.is_sparse else grad)
    dense = [parameter for parameter, one in zip(every, found, strict=True) if one is not None]
    call = ClippingCall(function, arguments, dense)
    for members in together.values():
        of_tables = members[0][1].place.gradients_of([live for _, live in members], call)
        for (at, _), one in zip(members, of_tables, strict=True):
            found[at] = one
    return [one for one in found if one is not None]
