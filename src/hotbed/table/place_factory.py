"""How a table gets its place."""

from __future__ import annotations

from collections.abc import Callable

from hotbed import _core
from hotbed.table.place import Place
from hotbed.tables import CORE_DTYPES, Table

__all__ = ["PlaceFactory", "make_core"]

PlaceFactory = Callable[[Table, int], Place]
"""Makes the place of a table with a key."""


def make_core(
    spec: Table,
    key: int,
    *,
    tiered: bool = False,
    elsewhere: bool = False,
    budget: _core.MemoryBudget | None = None,
) -> _core.Table:
    """The compiled table.

    Args:
        tiered: whether rows lie in tiers.
        elsewhere: whether they lie where the core has no part in it.
    """
    return _core.Table.make(
        spec.name,
        -1 if spec.rows is None else spec.rows,
        spec.dim,
        CORE_DTYPES[spec.dtype],
        spec.bands(),
        key,
        spec.padding_idx,
        tiered,
        elsewhere,
        budget,
        (spec.origin.first, spec.origin.stride, spec.origin.column),
    )
