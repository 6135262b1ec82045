"""Copies and pickles of a live table: its rows and key, without optimizer or gradient."""

from __future__ import annotations

import copy
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor

from hotbed.errors import TableError
from hotbed.holds import reading

__all__ = ["copied", "pickled"]


def copied(table: Any, memo: dict[int, Any]) -> Any:
    """A second live table.

    Raises:
        TableError: it lies in tiers, or would not fit in memory.
    """
    _refuse(table, "deepcopy")
    budget = copy.deepcopy(table.budget, memo)
    requires_grad = table.parameter.requires_grad
    with reading([table]):
        rows = _rows_of(table)
        return _restore(
            type(table), table.spec, table.key, requires_grad, rows, _away(table), budget
        )


def pickled(table: Any) -> Any:
    """What ``__reduce__`` returns.

    Raises:
        TableError: it lies in tiers, or would not fit in memory.
    """
    _refuse(table, "pickle")
    with reading([table]):
        rows = _rows_of(table)
    if rows is not None and get_spawning_popen() is not None:
        # A process that is being spawned would be sent tensors by the numbers of their files, which
        # are closed with these copies before it has started.
        rows = tuple(part.contiguous().view(torch.uint8).numpy() for part in rows)
    given = table.spec, table.key, table.parameter.requires_grad, rows, _away(table), table.budget
    return _restore, (type(table), *given)


def _refuse(table: Any, purpose: str) -> None:
    if table.tiers is not None:
        raise TableError(
            f"Table {table.name!r}: a table with Storage(...) cannot be copied or pickled: its tiers are "
            "its own. Make a new collection and load the state_dict."
        )
    table.refuse_copy_beyond_memory(purpose)


def _rows_of(table: Any) -> Any:
    return (table.ids(), table.current_weights().cpu()) if len(table) else None


def _away(table: Any) -> torch.device | None:
    return None if table.device_rows is None else table.device


def _restore(
    kind: type,
    spec: Any,
    key: int,
    requires_grad: bool,
    rows: Any,
    device: torch.device | None,
    budget: Any,
) -> Any:
    table = kind(spec, key, requires_grad=requires_grad, budget=budget)
    if rows is not None:
        if not isinstance(rows[0], Tensor):
            dtypes = torch.int64, spec.dtype
            rows = [torch.from_numpy(s).view(d) for s, d in zip(rows, dtypes, strict=True)]
        table.assign(*rows)
    if device is not None:
        table.move_to(device)
    return table
