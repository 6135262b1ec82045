"""Changes with which a plan that does not fit would: each is tried before it is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hotbed.dist.plan_arguments import Request
from hotbed.dist.plans import Plan
from hotbed.dist.sizes import OPTIMIZERS, States, TierSizes, bytes_in_words, states_of
from hotbed.sharding import MOST_RANKS, RowWise
from hotbed.tables import Table

__all__ = ["Remedy", "all_together_fit", "remedies_of"]

_MOST = 3
_MOST_TIMES = 64
"""Most ranks to try, as a multiple of those there are."""
_ROWWISE = {"adam": "rowwise-adam", "adamw": "rowwise-adam"}


class Remedy(NamedTuple):
    """One change with which all fits."""

    said: str
    request: Request

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `hotbed.plan` with that change."""
        return self.request.arguments


def remedies_of(request: Request, made: Plan) -> list[Remedy]:
    """The three cheapest, those first that cost neither accuracy nor hardware, then those that cost
    accuracy, then disks, then ranks."""
    tries: list[Callable[[Request, Plan], Iterator[Remedy]]] = [
        _other_strategy,
        _by_row,
        _rowwise_optimizer,
        _shorter_rows,
        _ssd,
        _more_ranks,
    ]
    found = (remedy for each in tries for remedy in each(request, made))
    return list(itertools.islice(found, _MOST))


def all_together_fit(request: Request) -> bool:
    """Return True if all tables fit with every change combined: the most ranks that are tried, tables
    row-wise in bfloat16, the smallest states."""
    tables = tuple(
        replace(t, sharding=RowWise(), dtype=torch.bfloat16 if t.dtype.itemsize > 2 else t.dtype)
        for t in request.tables
    )
    states = min(request.states, States(0, 1), key=lambda s: s.per_column)
    ranks = min(MOST_RANKS, _MOST_TIMES * request.world_size)
    return replace(request, tables=tables, states=states, world_size=ranks).fits


def _other_strategy(request: Request, made: Plan) -> Iterator[Remedy]:
    changed = replace(request, strategy="auto")
    if request.strategy != "auto" and changed.fits:
        yield Remedy('strategy "auto"', changed)


def _by_row(request: Request, made: Plan) -> Iterator[Remedy]:
    """As few tables as suffice, those first of which a rank keeps most."""

    def most(table: Table) -> int:
        kind, rows = made.shardings[table.name], made.sizes.rows_of(table)
        extents = kind.extents(table, rows, request.world_size)
        return max(made.sizes.load_of(table, e.rows, e.columns).total for e in extents)

    uncut = [t for t in request.tables if made.shardings[t.name].name != RowWise.name]
    uncut.sort(key=most, reverse=True)

    def changed(count: int) -> Request:
        names = {table.name for table in uncut[:count]}
        return replace(
            request,
            tables=tuple(
                replace(t, sharding=RowWise()) if t.name in names else t for t in request.tables
            ),
        )

    if uncut and request.world_size > 1 and changed(len(uncut)).fits:
        count = _least(lambda count: changed(count).fits, 0, len(uncut))
        named = f"table {uncut[0].name!r}"
        if count > 1:
            named = f"the {count:,} tables of which a rank keeps most, such as {uncut[0].name!r},"
        yield Remedy(f'{named} cut by row (sharding="row")', changed(count))


def _rowwise_optimizer(request: Request, made: Plan) -> Iterator[Remedy]:
    if not request.states.per_column:
        return
    named = [n for n, kind in OPTIMIZERS.items() if request.optimizer in (n, kind)]
    name = next((_ROWWISE[n] for n in named if n in _ROWWISE), "rowwise-adagrad")
    changed = replace(request, optimizer=name, states=states_of(name))
    plan = changed.plan()
    if changed.states.per_column < request.states.per_column and not any(plan.missing):
        yield Remedy(f"the optimizer {name}, {_saved(made, plan)}", changed)


def _shorter_rows(request: Request, made: Plan) -> Iterator[Remedy]:
    shorter = tuple(
        replace(table, dtype=torch.bfloat16) if table.dtype.itemsize > 2 else table
        for table in request.tables
    )
    changed = replace(request, tables=shorter)
    plan = changed.plan()
    if shorter != request.tables and not any(plan.missing):
        yield Remedy(f"rows of bfloat16, {_saved(made, plan)}", changed)


def _ssd(request: Request, made: Plan) -> Iterator[Remedy]:
    memories = [
        ("host" if n == "memory" else n, size) for n, size in request.tiers.bytes if n != "ssd"
    ]
    endless = replace(request, tiers=TierSizes((*memories, ("ssd", None)))).plan()
    if any(endless.missing):  # the index finds no room
        return
    needed = max(endless.tiers.filled(load)[0]["ssd"] for load in endless.loads)
    unit = 10 ** max(0, len(str(needed)) - 2)
    size = -(-needed // unit) * unit
    tiers = TierSizes((*memories, ("ssd", size)))
    yield Remedy(f"an SSD of {bytes_in_words(size)} a rank", replace(request, tiers=tiers))


def _more_ranks(request: Request, made: Plan) -> Iterator[Remedy]:
    def fits(world_size: int) -> bool:
        return replace(request, world_size=world_size).fits

    few, many = request.world_size, request.world_size * 2
    while many <= min(MOST_RANKS, _MOST_TIMES * request.world_size):
        if fits(many):
            count = _least(fits, few, many)
            said = f"{count:,} ranks instead of {request.world_size:,}"
            yield Remedy(said, replace(request, world_size=count))
            return
        few, many = many, many * 2


def _least(fits: Callable[[int], bool], too_few: int, enough: int) -> int:
    """A number that fits, while one less does not."""
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough


def _saved(made: Plan, other: Plan) -> str:
    saved = sum(load.total for load in made.loads) - sum(load.total for load in other.loads)
    return f"which saves {bytes_in_words(saved)} on all ranks together"
