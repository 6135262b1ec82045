"""Optimizer states of a table by id: copied out, put back."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import OptimizerError
from hotbed.table.live import LiveTable
from hotbed.table.locks import alone
from hotbed.table.records import Records, rows_at_once

__all__ = [
    "check_states",
    "copy_states",
    "replacing_rows",
    "reset_states",
    "settle_rows",
    "write_states",
]

_replaced: contextvars.ContextVar[Sequence[LiveTable]] = contextvars.ContextVar(
    "tables that are about to get other rows", default=()
)


def copy_states(live: LiveTable) -> dict[str, Tensor]:
    """``{"ids": (rows,) rising, state: (rows, dim or 1), ...}`` as of the last step. Of a tiered static
    table, the rows that are stored; no step has touched the others.

    Raises:
        OptimizerError: the copy would not fit in memory.
    """
    live.raise_deferred()
    if (found := live.place.all_states()) is None:
        return {}  # rank 0 has them
    ids, states = found
    return {"ids": ids.clone(), **dict(zip(live.core.state_names, states, strict=True))}


def reset_states(live: LiveTable) -> None:
    """Gives all rows the first values of their states."""
    rule = live.held_rule
    options, initial = rule.options, rule.initial_accumulator_value
    firsts = [first for _, _, first in _core.state_planes(options, initial)]
    live.allocate()
    live.place.changing("states")
    live.place.reset_states(rule, firsts)


@contextlib.contextmanager
def replacing_rows(tables: Iterable[LiveTable]) -> Iterator[None]:
    """For a ``with`` statement, after which these tables get other rows: `settle_rows` leaves them out."""
    before = _replaced.set([*tables])
    try:
        yield
    finally:
        _replaced.reset(before)


def settle_rows(live: LiveTable, base: Sequence[float]) -> None:
    """Bring rows up to date with the steps taken, before their rule starts over and forgets these.

    Args:
        base: what the steps that take their place did to a row that no batch has touched.
    """
    if live in _replaced.get():
        return
    live.allocate()
    for table in live.place.tables_here(live):
        if not table.follows or not table.held_rule.steps:
            continue
        own = list(table.held_rule.base)
        # Rows that are stored nowhere are first values moved by all steps, and would move with `base`.
        every = table.spec.rows is not None and own[0] != 1 and own != list(base)
        with alone([table]):
            table.place.changing("catch up")
            stored = table.core.stored_ids()
            ids = torch.arange(table.spec.rows or 0, device="cpu") if every else stored
            for some in ids.split(rows_at_once(table.core)):  # type: ignore[no-untyped-call]
                table.place.write(Records(some))


def check_states(live: LiveTable, states: Mapping[str, object]) -> dict[str, Tensor]:
    """States as `write_states` takes them.

    Args:
        states: as `copy_states` gave them; or without ids, as torch's optimizers have them for a dense
            parameter of shape (rows, dim): row k is then that of id k.

    Raises:
        OptimizerError: they do not fit the table.
    """
    wanted, ids = live.core.state_names, states.get("ids")
    found = {name: value for name, value in states.items() if _is_dense(value)}
    absent = [name for name in wanted if name not in found]
    if absent:
        raise OptimizerError(
            f"Table {live.name!r}: the loaded optimizer state lacks {', '.join(absent)}; it has "
            f"{', '.join(map(str, states)) or 'nothing'}. It comes from another kind of optimizer, or "
            "from another option such as amsgrad or momentum."
        )
    if ids is None:
        rows = len(found[wanted[0]]) if wanted and found[wanted[0]].dim() else 0
        if wanted and live.spec.rows not in (None, rows):
            raise OptimizerError(
                f"Table {live.name!r}: the loaded state {wanted[0]} is of {rows} rows, the table has "
                f"{live.spec.rows}."
            )
        ids = torch.arange(rows, device="cpu")
    if not _is_dense(ids) or ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise OptimizerError(
            f"Table {live.name!r}: the ids of the loaded optimizer state must be (n,) int64."
        )
    for name, width in zip(wanted, live.core.state_widths(), strict=True):
        shape = (len(ids), width)
        if tuple(found[name].shape) != shape:
            raise OptimizerError(
                f"Table {live.name!r}: the loaded state {name} has shape "
                f"{tuple(found[name].shape)}, expected {shape}."
            )
    if live.spec.rows is not None and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= live.spec.rows:
            raise OptimizerError(
                f"Table {live.name!r}: the loaded optimizer state has id "
                f"{low if low < 0 else high}, which is outside [0, {live.spec.rows})."
            )
    return {"ids": ids, **{name: found[name] for name in wanted}}


def _is_dense(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided


def write_states(live: LiveTable, states: Mapping[str, Tensor]) -> None:
    """Puts states back by id, as of the last step. Ids without a row get one."""
    live.allocate()
    ids = states["ids"].to(dtype=torch.int64, device="cpu")
    values = [states[name].detach() for name in live.core.state_names]
    steps = torch.full_like(ids, live.held_rule.steps) if live.follows else None
    live.write(Records(ids, states=values, steps=steps))
