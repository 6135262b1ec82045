"""Gradients of many batches become those of one, so that any number of backwards can come before a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.exchange import Exchange
from hotbed.dist.handshake import MERGE, Opened
from hotbed.dist.ranks import Ranks
from hotbed.ops.duplicates import sum_duplicates
from hotbed.places.host.step import rows_of
from hotbed.table.gradients import GradientRows

__all__ = ["merge", "serve_merge"]


class _Merged:
    """Stands for the batches that were merged, as long as a gradient of theirs waits on this rank."""

    def __init__(self, trip: Exchange) -> None:
        self.trip = trip


def merge(ranks: Ranks) -> None:
    """Sum the gradients that wait on each rank by id, in the order of the backwards, and look these ids up in
    place of the batches. Called by all ranks that have batches.

    Batches whose backward is yet to come wait on.
    """
    trips = ranks.waiting.trips
    numbers = [*dict.fromkeys(number for trip in trips for number in trip.layout.numbers)]
    tables = [ranks.table(number) for number in numbers]
    with ranks.telling(MERGE):
        found = [_summed(live, trips) for live in tables]
    trip = Exchange(ranks, [live.place for live in tables], [ids for ids, _ in found])
    opened = ranks.agree(MERGE, trip.numbers, numbers)
    merged = _Merged(trip)
    _look_up(ranks, trip, opened, merged)
    for t, (live, (_, rows)) in enumerate(zip(tables, found, strict=True)):
        if rows is not None:
            slots = trip.first_slots[t] + trip.renumbered(t, torch.arange(len(rows)))
            live.parameter.waiting.put(
                live.parameter, GradientRows(slots, rows, True, False, merged)
            )
    del merged
    _let_go(ranks)


def serve_merge(ranks: Ranks, opened: Opened) -> None:
    """The part of a rank that has no batch."""
    places = [ranks.table(number).place for number in opened.tables]
    trip = Exchange(ranks, places, [torch.empty(0, dtype=torch.int64) for _ in places])
    with torch.enable_grad():
        _look_up(ranks, trip, opened, None)
    _let_go(ranks)


def _look_up(ranks: Ranks, trip: Exchange, opened: Opened, merged: _Merged | None) -> None:
    fault: Exception | None = None
    try:
        trip.take_over(opened.numbers)
    except Exception as error:
        fault = error
    ranks.agree(MERGE, fault=fault)
    trip.wait(merged)


def _let_go(ranks: Ranks) -> None:
    """Release the batches that were merged."""
    ranks.agree(MERGE)
    ranks.waiting.merged()


def _summed(live: Any, trips: Sequence[Exchange]) -> tuple[Tensor, Tensor | None]:
    """(n,) distinct ids and (n, dim) rows of what waits of a table; None: nothing does."""
    rows = rows_of(live)
    if rows is None:
        return torch.empty(0, dtype=torch.int64), None
    number = live.place.number
    here = [
        (trip, trip.layout.position[number]) for trip in trips if number in trip.layout.position
    ]
    asked = [trip.asked[t] for trip, t in here]
    firsts = torch.tensor([trip.first_slots[t] for trip, t in here])  # rising
    counts = torch.tensor([len(ids) for ids in asked])
    begins = counts.cumsum(0) - counts
    slots, values = rows.slots, rows.rows
    of_trip = (torch.searchsorted(firsts, slots, right=True) - 1).clamp(min=0)
    within = slots - firsts[of_trip]
    inside = (within >= 0) & (within < counts[of_trip])
    if not bool(inside.all()):
        of_trip, within, values = of_trip[inside], within[inside], values[inside]
    ids = torch.cat(asked)[begins[of_trip] + within]
    distinct, positions = torch.empty_like(ids), torch.empty_like(ids)
    given = ids.data_ptr(), len(ids), distinct.data_ptr(), positions.data_ptr()
    count = _core.group_ids(*given)
    _, summed = sum_duplicates(positions, values)  # in the order of the ids, as both first appear
    return distinct[:count], summed
