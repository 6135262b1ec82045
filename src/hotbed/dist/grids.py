"""Tables of a plan that are cut among machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hotbed.errors import PlanError
from hotbed.sharding import (
    GridWise,
    RowWise,
    Sharding,
    checked_local_size,
    checked_world_size,
    sharding_of,
)
from hotbed.tables import SUMMED, Table

__all__ = ["among_machines", "checked_ranks", "with_grids"]


def checked_ranks(given: object) -> tuple[int, int | None]:
    """Return (ranks, ranks of a machine) for a number of ranks, or (machines, ranks of each).

    Raises:
        PlanError: it is neither.
    """
    match given:
        case (machines, local):
            of_each = checked_local_size(local)
            return checked_world_size(machines) * checked_world_size(of_each), of_each
        case _:
            return checked_world_size(given), None


def with_grids(
    tables: Sequence[Table], world_size: int, local_world_size: int | None
) -> list[Table]:
    """Return tables in which wishes for `GridWise` name the ranks of each machine.

    Raises:
        PlanError: there is such a wish, and `local_world_size` is None.
    """
    found = []
    for table in tables:
        wish = None if table.sharding is None else sharding_of(table.sharding)
        if isinstance(wish, GridWise) and not wish.placed:
            local = local_world_size or (1 if world_size == 1 else None)
            if local is None:
                raise PlanError(
                    f"Table {table.name!r}: sharding {wish.name!r} needs the ranks of machines, as in "
                    "world_size=(2, 8), or groups of ranks: GridWise(((0, 1), (2, 3)))."
                )
            made = GridWise.of_machines(world_size, local)
            table = dataclasses.replace(
                table, sharding=dataclasses.replace(made, placement=wish.placement)
            )
        found.append(table)
    return found


def among_machines(
    tables: Sequence[Table],
    shardings: Mapping[str, Sharding],
    world_size: int,
    local_world_size: int | None,
) -> dict[str, Sharding]:
    """Return shardings in which machines, and not ranks, keep the rows of tables that a strategy has cut by
    row and whose bags owners pool. Each machine is then sent one vector a bag by each other one."""
    found = dict(shardings)
    if local_world_size is None or not 1 < local_world_size < world_size:
        return found
    for table in tables:
        free = table.sharding is None and table.combiner in SUMMED
        if free and found[table.name] == RowWise() and table.dim >= local_world_size:
            found[table.name] = GridWise.of_machines(world_size, local_world_size)
    return found
