"""The kinds by name: replicated, by table, by row, by column, as a grid of both."""

from __future__ import annotations

from hotbed.errors import PlanError
from hotbed.sharding.column import ColumnWise
from hotbed.sharding.grid import GridWise
from hotbed.sharding.kind import Sharding
from hotbed.sharding.row import RowWise
from hotbed.sharding.whole import Replicated, TableWise

__all__ = ["KINDS", "sharding_of"]

KINDS: dict[str, type[Sharding]] = {
    kind.name: kind for kind in (Replicated, TableWise, RowWise, ColumnWise, GridWise)
}


def sharding_of(given: object) -> Sharding:
    """A kind, or what its name is short for.

    Raises:
        PlanError: it is neither.
    """
    if isinstance(given, Sharding):
        return given
    if isinstance(given, str) and given in KINDS:
        return KINDS[given]()
    names = ", ".join(repr(name) for name in KINDS)
    raise PlanError(f"A sharding is a kind of hotbed.dist or one of {names}, not {given!r}.")
