"""Ids and rows that a user gives, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotbed.arrays import id_tensor, real_tensor
from hotbed.errors import IdError, InputError, TableError
from hotbed.tables import Table

__all__ = ["checked_ids", "checked_rows"]


def checked_ids(spec: Table, given: Any) -> Tensor:
    """(n,) int64 ids of a table, on the host.

    Raises:
        IdError, InputError: they are none.
    """
    ids = id_tensor(f"Table {spec.name!r}", given)
    if ids.dim() != 1:
        raise InputError(f"Table {spec.name!r}: ids must be 1-D, got shape {tuple(ids.shape)}.")
    ids = ids.to(dtype=torch.int64, device="cpu").contiguous()
    origin = spec.origin
    if spec.rows is not None and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= spec.rows:
            wrong = origin.ids_in_table(low if low < 0 else high)
            raise IdError(
                f"Table {spec.name!r}: id {wrong} is outside [0, {origin.rows}). Pass rows=None for "
                "open-ended ids."
            )
    elif origin.owns is not None and not bool((own := origin.owns(ids)).all()):
        raise IdError(
            f"Table {spec.name!r}: id {int(ids[~own][0])} belongs to another part of the table."
        )
    return ids


def checked_rows(spec: Table, ids: Tensor, given: Any) -> Tensor:
    """(n, dim) values for the rows of n ids.

    Raises:
        InputError, TableError: they are none.
    """
    values = real_tensor(f"Table {spec.name!r}", "rows", given).detach()
    if values.shape != (len(ids), spec.dim):
        raise TableError(
            f"Table {spec.name!r}: {len(ids)} ids need values of shape ({len(ids)}, {spec.dim}), got "
            f"{tuple(values.shape)}."
        )
    return values
