"""Copies and pickles of a live table: its rows and key, without optimizer or gradient."""

from __future__ import annotations

import copy
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor

from hotbed.table.locks import reading

__all__ = ["copied", "pickled"]


def copied(table: Any, memo: dict[int, Any]) -> Any:
    """A second live table.

    Raises:
        TableError: it lies in tiers, or would not fit in memory.
    """
    made_by = table.place.for_copy(memo)
    table.place.refuse_copy_beyond_memory("deepcopy")
    with reading([table]):
        table.raise_deferred()
        group = copy.deepcopy(table.group, memo)
        made: tuple[Any, ...] = *_made_of(table), group, *made_by, _rows_of(table)
        return _restore(*made)


def pickled(table: Any) -> Any:
    """Return what ``__reduce__`` must.

    Raises:
        TableError: it lies in tiers, or would not fit in memory.
    """
    made_by = table.place.for_copy(None)
    table.place.refuse_copy_beyond_memory("pickle")
    with reading([table]):
        table.raise_deferred()
        # Pickle reads them when the table is no longer held.
        rows = _rows_of(table, own=True)
    if rows is not None and get_spawning_popen() is not None:
        # A process that is being spawned would be sent tensors by the numbers of their files, which
        # are closed with these copies before it has started.
        rows = tuple(part.contiguous().view(torch.uint8).numpy() for part in rows)
    return _restore, (*_made_of(table), table.group, *made_by, rows)


def _made_of(table: Any) -> tuple[type, Any, int, bool]:
    return type(table), table.spec, table.key, table.parameter.requires_grad


def _rows_of(table: Any, *, own: bool = False) -> Any:
    if not len(table):
        return None
    if table.spec.rows is not None:
        return table.ids(), table.current_weights().to("cpu", copy=own)
    rows = list(table.records(states=False))  # by slot, as the copy will have them
    return torch.cat([some.ids for some in rows]), torch.cat([some.weights for some in rows])


def _restore(
    kind: type,
    spec: Any,
    key: int,
    requires_grad: bool,
    group: Any,
    home: Any,
    bring: Any,
    rows: Any,
) -> Any:
    table = kind(spec, key, home, group=group, requires_grad=requires_grad)
    if rows is not None:
        if not isinstance(rows[0], Tensor):
            dtypes = torch.int64, spec.dtype
            rows = [torch.from_numpy(s).view(d) for s, d in zip(rows, dtypes, strict=True)]
        table.assign(*rows)
    if bring is not None:
        bring(table)
    return table
