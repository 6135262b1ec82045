"""Copies and pickles of a live table: its rows and key, without optimizer or gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotbed.table.locks import reading
from hotbed.table.place import MovedTable
from hotbed.table.place_factory import PlaceFactory
from hotbed.table.records import Records
from hotbed.tables import Table

__all__ = ["copied", "pickled"]

_Rows = tuple[Tensor, Tensor] | tuple[np.ndarray, np.ndarray] | None
"""Ids and weights; as bytes for a process that is being spawned."""


class CopiedTable(MovedTable, Protocol):
    """A live table that can be copied."""

    @property
    def key(self) -> int: ...
    @property
    def group(self) -> object: ...

    def __len__(self) -> int: ...
    def ids(self) -> Tensor: ...
    def current_weights(self) -> Tensor: ...
    def records(self, *, states: bool = True) -> Iterator[Records]: ...
    def assign(self, ids: Tensor, values: Tensor) -> None: ...


T = TypeVar("T", bound=CopiedTable)


def copied(table: T, memo: dict[int, object]) -> T:
    """A second live table.

    Raises:
        TableError: it lies in tiers, or would not fit in memory.
    """
    made_by = table.place.for_copy(memo)
    table.place.refuse_copy_beyond_memory("deepcopy")
    with reading([table]):
        table.raise_deferred()
        group = copy.deepcopy(table.group, memo)
        return _restore(*_made_of(table), group, *made_by, _rows_of(table))


def pickled(table: CopiedTable) -> tuple[object, ...]:
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
    sent: _Rows = rows
    if rows is not None and get_spawning_popen() is not None:
        # A process that is being spawned would be sent tensors by the numbers of their files, which
        # are closed with these copies before it has started.
        ids, weights = (part.contiguous().view(torch.uint8).numpy() for part in rows)
        sent = ids, weights
    return _restore, (*_made_of(table), table.group, *made_by, sent)


def _made_of(table: T) -> tuple[Callable[..., T], Table, int, bool]:
    return type(table), table.spec, table.key, table.parameter.requires_grad


def _rows_of(table: CopiedTable, *, own: bool = False) -> tuple[Tensor, Tensor] | None:
    if not len(table):
        return None
    if table.spec.rows is not None:
        return table.ids(), table.current_weights().to("cpu", copy=own)
    rows = list(table.records(states=False))  # by slot, as the copy will have them
    return torch.cat([some.ids for some in rows]), torch.cat(
        [some.weights for some in rows if some.weights is not None]
    )


def _restore(
    kind: Callable[..., T],
    spec: Table,
    key: int,
    requires_grad: bool,
    group: object,
    home: PlaceFactory,
    bring: Callable[[MovedTable], None] | None,
    rows: _Rows,
) -> T:
    table = kind(spec, key, home, group=group, requires_grad=requires_grad)
    if rows is not None:
        ids, weights = (
            part if isinstance(part, Tensor) else torch.from_numpy(part).view(dtype)
            for part, dtype in zip(rows, (torch.int64, spec.dtype), strict=True)
        )
        table.assign(ids, weights)
    if bring is not None:
        bring(table)
    return table
