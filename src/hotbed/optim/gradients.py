"""The gradient of a table as an optimizer takes it, and telling tables from dense parameters."""

from __future__ import annotations

from typing import Any

import torch

from hotbed.errors import NotFiniteError, OptimizerError
from hotbed.gradients import LeftRows, stored_gradient
from hotbed.handles import LiveTable, live_table

__all__ = ["not_finite", "rows_of", "split_parameters"]


def rows_of(live: LiveTable) -> LeftRows | None:
    """The gradient of a table in the core's memory, as it is to be stepped; None where it has none.

    Raises:
        OptimizerError: it is none of a lookup, and the table needs one that is.
    """
    handle = live.parameter
    if len(handle.waiting.shares) == 1 and stored_gradient(handle) is None:
        share: LeftRows = handle.waiting.shares[0]
        return share
    grad = handle.grad
    if grad is None:
        return None
    if grad.is_sparse and live.place.rows_move and grad._nnz():
        if not handle.waiting.origins_of(handle):
            raise OptimizerError(
                f"Table {live.name!r} lies in tiers and its gradient comes from no batch of it, so its "
                "rows may be anywhere. Use the vectors that forward returns."
            )
    if grad.is_sparse:
        slots, values = grad._indices()[0], grad._values()
    elif (
        live.spec.rows is not None and not live.place.rows_move
    ):  # the loss used the parameter itself
        slots, values = torch.arange(live.spec.rows), grad
    else:
        kind = "is dynamic" if live.spec.rows is None else "lies in tiers"
        raise OptimizerError(
            f"Table {live.name!r} {kind} and has a dense gradient: the loss used its parameter "
            "directly. Use the vectors that forward returns."
        )
    if values.dtype != live.spec.compute_dtype:
        values = values.to(live.spec.compute_dtype)
    return LeftRows(slots.contiguous(), values.contiguous())


def not_finite(live: LiveTable, slot: int, element: int, *, fused: bool = False) -> NotFiniteError:
    """The error for element `element` of a table's gradient rows, which is in the row of `slot`."""
    unchanged = (
        "the table was not changed, other tables may have been (fused=True)"
        if fused
        else "no row and no parameter was changed"
    )
    return NotFiniteError(
        f"Table {live.name!r}, id {live.id_of(slot)}, column {element % live.spec.dim}: the gradient is "
        f"NaN or infinite; {unchanged}. Skip the batch, or look for the division or logarithm behind."
    )


def split_parameters(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """The parameters of a model as (tables, dense), for two optimizers.

    >>> tables, dense = hb.split_parameters(model)
    >>> optimizers = hb.optim.Adagrad(tables, lr=0.02), torch.optim.AdamW(dense, lr=1e-3)
    """
    tables: list[Any] = []
    dense: list[Any] = []
    for parameter in model.parameters():
        (dense if live_table(parameter) is None else tables).append(parameter)
    return tables, dense
