"""Gradient rows whose slots repeat."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed import _core

__all__ = ["sum_duplicates"]


def sum_duplicates(slots: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same gradient with every slot once.

    Args:
        slots: (n,) int64, none negative.
        values: (n, dim) float32 or float64.

    Returns:
        (unique,) slots in the order of first appearance and (unique, dim) sums, rows added in the
        order given, whatever the thread count. The arguments themselves if no slot repeats.
    """
    slots, values = slots.contiguous(), values.contiguous()
    if not _core.has_duplicates(slots.data_ptr(), len(slots)):
        return slots, values
    made: list[Tensor] = []

    def allocate(count: int) -> tuple[int, int]:
        made.append(slots.new_empty(count))
        made.append(values.new_empty((count, values.shape[1])))
        return made[0].data_ptr(), made[1].data_ptr()

    total = _core.sum_duplicates_f64 if values.dtype == torch.float64 else _core.sum_duplicates_f32
    total(slots.data_ptr(), values.data_ptr(), len(slots), values.shape[1], allocate)
    return made[0], made[1]
