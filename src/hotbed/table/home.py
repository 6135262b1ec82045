"""How a table gets its place, and which tables have places that go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hotbed import _core
from hotbed.errors import TableError
from hotbed.table.place import Place
from hotbed.tables import CORE_DTYPES, Table

__all__ = ["Home", "make_core", "refuse_mixed_places"]

Home = Callable[[Table, int], Place]
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
        *spec.distribution(),
        key,
        spec.padding_idx,
        tiered,
        elsewhere,
        budget,
        (spec.origin.first, spec.origin.stride, spec.origin.column),
    )


def refuse_mixed_places(tables: Mapping[str, Any]) -> None:
    """Raises TableError unless tables, by the names that errors are to use, can serve one call."""
    (name, first), *others = ((name, table.place) for name, table in tables.items())
    for other_name, other in others:
        if other.group == first.group:
            continue
        if first.rows_move and other.rows_move:
            raise TableError(
                f"Tables {name!r} and {other_name!r} have Storage of their own each, and one call "
                "cannot serve both. Make one EmbeddingCollection of them with one Storage."
            )
        raise TableError(
            f"Tables {name!r} and {other_name!r} of one module lie in different places: "
            f"{first.where} and {other.where}. Move the whole module, or leave one out of it."
        )
