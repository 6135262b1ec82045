"""Rows that this process keeps of a table that ranks share: read and written without the others."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.errors import IdError, TableError
from hotbed.table.checks import Missing, any_ids, checked_ids, checked_rows, refuse_to_erase
from hotbed.table.live import LiveTable

__all__ = [
    "local_assign",
    "local_contains",
    "local_count",
    "local_erase",
    "local_lookup",
    "local_rows",
]


def local_count(live: LiveTable) -> int:
    return sum(len(part) for part in live.place.tables_here(live))


def local_rows(live: LiveTable) -> tuple[Tensor, Tensor]:
    """(n,) ids, rising, and (n, dim) rows."""
    _refuse_columns(live)
    found = [part.all_rows() for part in live.place.tables_here(live)]
    origins = [part.spec.origin for part in live.place.tables_here(live)]
    nothing = (
        torch.empty(0, dtype=torch.int64),
        torch.empty((0, live.spec.dim), dtype=live.spec.dtype),
    )
    ids = [origin.ids_in_table(own) for origin, (own, _) in zip(origins, found, strict=True)]
    return torch.cat([nothing[0], *ids]), torch.cat([nothing[1], *(rows for _, rows in found)])


def local_lookup(live: LiveTable, given: object, missing: Missing = "initial") -> Tensor:
    """(n, dim) rows of (n,) ids, which must be this process's."""
    _refuse_columns(live)
    ids = checked_ids(live.spec, given)
    for part, own, _ in live.place.parts(live, ids, torch.empty((len(ids), live.spec.dim))):
        if len(own) == len(ids):
            return part.lookup(own, missing)
    if not len(ids):
        return torch.empty((0, live.spec.dim), dtype=live.spec.dtype)
    raise IdError(
        f"Table {live.name!r}: another rank keeps some of these {len(ids)} ids. Leave local=True out, on all "
        "ranks, to ask the others for them."
    )


def local_contains(live: LiveTable, given: object) -> Tensor:
    """(n,) bool: of which of (n,) ids this process keeps rows, or columns of them."""
    ids = any_ids(live.spec, given)
    found = torch.zeros(len(ids), dtype=torch.bool)
    known = torch.arange(len(ids))
    if live.spec.rows is not None:
        known = torch.nonzero((ids >= 0) & (ids < live.spec.rows)).flatten()
    numbers = known[:, None].expand(-1, live.spec.dim)
    for part, own, some in live.place.parts(live, ids[known], numbers):
        found[some[:, 0]] |= part.contains(own)
    return found


def local_assign(live: LiveTable, given: object, values: object) -> None:
    """Writes those of the rows that this process keeps, and passes over the others."""
    live.place.refuse_local_change("assign()")
    ids = checked_ids(live.spec, given)
    rows = checked_rows(live.spec, ids, values)
    for part, own, some in live.place.parts(live, ids, rows):
        part.assign(own, some)


def local_erase(live: LiveTable, given: object) -> int:
    live.place.refuse_local_change("erase()")
    ids = checked_ids(live.spec, given)
    refuse_to_erase(live.spec, live.has_gradient)
    live.generation += 1
    nothing = torch.empty((len(ids), live.spec.dim))
    return sum(part.erase(own) for part, own, _ in live.place.parts(live, ids, nothing))


def _refuse_columns(live: LiveTable) -> None:
    if any(part.spec.dim != live.spec.dim for part in live.place.tables_here(live)):
        raise TableError(
            f"Table {live.name!r} is kept by columns; no rank has whole rows of it. Leave local=True out, on "
            "all ranks."
        )
