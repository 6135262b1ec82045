"""`plan`, and what it says when nothing fits."""

from __future__ import annotations

import collections
import dataclasses
import difflib
from collections.abc import Iterable, Mapping

from torch import nn

from hotbed.arrays import is_one_of, iterated
from hotbed.dist.grids import checked_ranks
from hotbed.dist.measured import Measured
from hotbed.dist.plan_arguments import Request
from hotbed.dist.plans import Plan, checked_tables
from hotbed.dist.remedies import all_together_fit, remedies_of
from hotbed.dist.sizes import States, TierSizes, bytes_in_words, expected, states_of
from hotbed.dist.strategies import STRATEGIES, Thresholds
from hotbed.errors import PlanError
from hotbed.modules.owner import tables_of
from hotbed.optim import TableOptimizer
from hotbed.storage import Storage
from hotbed.table.live import LiveTable
from hotbed.tables import Table

__all__ = ["plan", "tables_in", "tables_to_plan"]


def plan(
    tables_or_model: Iterable[Table] | nn.Module,
    world_size: int | tuple[int, int],
    *,
    strategy: str | Measured = "auto",
    column_slice_threshold: int | None = None,
    row_slice_threshold: int | None = None,
    data_parallel_threshold: int | None = None,
    optimizer: str | type[TableOptimizer] | States | None = None,
    expected_rows: Mapping[str, int] | None = None,
    storage: Storage | Mapping[str, int | str | None] | None = None,
    memory: int | str | None = None,
) -> Plan:
    """Plan which of `world_size` ranks keeps which part of which table.

    This is pure arithmetic: the same arguments give the same plan everywhere. See docs/plans.md.

    >>> print(hb.plan(model, 8, optimizer="adagrad", memory="80GB"))

    Args:
        tables_or_model: `Table`s with distinct names, or a module with tables.
        world_size: number of ranks; or (machines, ranks of each, side by side). Tables of pooled bags that a
            strategy cuts by row are then `GridWise`, where `optimizer` is given and needs no whole rows.
        strategy: ``"auto"``: small tables replicated, large and dynamic ones by row, others whole on one
            rank, balanced by bytes. ``"basic"``, ``"memory_balanced"``, ``"memory_optimized"``: those of
            NVIDIA's distributed-embeddings. A `Measured`: the plan whose predicted step is shortest, of
            these and of others. ``Table(sharding=...)`` goes before any of them.
        column_slice_threshold: most elements (rows x dim) of a slice of columns.
        row_slice_threshold: tables of so many elements or more are cut by row.
        data_parallel_threshold: tables of so many elements or fewer are replicated.
        optimizer: whose states are counted, by its name or class; `States` where options add some.
        expected_rows: of dynamic tables, which else count nothing.
        storage: what the tiers of one rank hold: a `Storage`, whose SSD has no end, or sizes such as
            ``{"device": "80GB", "host": "400GB", "ssd": "4TB"}``.
        memory: the same, of a rank with one tier.

    Raises:
        PlanError: an argument, or a wish of a table, that cannot be; or some rank keeps more than its tiers
            hold. The message then names the three cheapest changes with which all fits, and
            ``error.remedies[i].arguments`` are arguments for this function.
    """
    tables, (ranks, local) = tables_in(tables_or_model), checked_ranks(world_size)
    request = Request(
        tables=tuple(tables),
        world_size=ranks,
        strategy=_checked_strategy(strategy),
        thresholds=_checked_thresholds(
            column_slice_threshold, row_slice_threshold, data_parallel_threshold
        ),
        optimizer=optimizer,
        states=states_of(optimizer),
        expected_rows=expected({table.name: table for table in tables}, expected_rows),
        tiers=TierSizes.of(storage, memory),
        local_world_size=local,
    )
    made = request.plan()
    if any(made.missing):
        raise _nothing_fits(request, made)
    return made


def tables_to_plan(model: nn.Module) -> dict[LiveTable, Table]:
    """The tables of a model as a plan has them: by their names, or where several have one name, as layers
    of their own do, by those in the model's ``state_dict``."""
    tables = tables_of(model)
    names = collections.Counter(live.name for live in tables.values())
    return {
        live: live.spec if names[live.name] == 1 else dataclasses.replace(live.spec, name=stem)
        for stem, live in tables.items()
    }


def tables_in(given: object) -> list[Table]:
    """The tables of a module, or those given.

    Raises:
        PlanError: there are none, or two have one name.
    """
    if isinstance(given, nn.Module):
        found = list(tables_to_plan(given).values())
        if not found:
            raise PlanError(f"{type(given).__name__} has no tables to plan.")
        return checked_tables(found)
    if isinstance(given, Table | str | Mapping) or iterated(given) is None:
        raise PlanError(f"A plan is for a list of hotbed.Table or for a module, not {given!r}.")
    return checked_tables(given)


def _checked_strategy(given: object) -> str | Measured:
    if isinstance(given, Measured) or (isinstance(given, str) and given in STRATEGIES):
        return given
    if is_one_of(given, ("measured",)):
        raise PlanError(
            "A measured plan needs a machine's figures: strategy=hotbed.dist.Measured(rates, traffic), with "
            "rates of hotbed.dist.measure() or Rates.read(FILE)."
        )
    near = difflib.get_close_matches(str(given), STRATEGIES, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(STRATEGIES)}."
    raise PlanError(f"There is no strategy {given!r}. {hint}")


def _checked_thresholds(
    column: int | None, row: int | None, data_parallel: int | None
) -> Thresholds:
    given = Thresholds(column, row, data_parallel)
    for name, value in zip(("column_slice", "row_slice", "data_parallel"), given, strict=True):
        if value is not None and (type(value) is not int or value < 1):
            raise PlanError(f"{name}_threshold is a number of elements from 1 on, not {value!r}.")
    return given


def _nothing_fits(request: Request, made: Plan) -> PlanError:
    missing = made.missing
    rank = missing.index(max(missing))
    sizes = ", ".join(
        f"{name} {bytes_in_words(size)}" for name, size in request.tiers.bytes if size is not None
    )
    remedies = remedies_of(request, made)
    error = PlanError(
        f"Rank {rank} of {request.world_size} would keep {bytes_in_words(made.loads[rank].total)}, which is "
        f"{bytes_in_words(missing[rank])} more than it has room for ({sizes}). "
        + _advice([remedy.said for remedy in remedies], together=all_together_fit(request))
    )
    error.remedies = tuple(remedies)
    return error


def _advice(remedies: list[str], *, together: bool) -> str:
    if not remedies and not together:
        return "No other plan fits into so little: give each rank more."
    if not remedies:
        return (
            "No change helps alone: combine more ranks with rows of bfloat16, a row-wise optimizer, and "
            'sharding="row".'
        )
    if len(remedies) == 1:
        return f"It would fit with {remedies[0]}."
    listed = "; ".join(f"({at}) {remedy}" for at, remedy in enumerate(remedies, 1))
    return f"It would fit with any of these, the cheapest first: {listed}."
