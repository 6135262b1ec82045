"""Gradients of many batches become those of one, so that any number of backwards can come before a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.exchange import Fetched, keep, look_up_owned, order_by_owner, send_ids, send_no_ids
from hotbed.dist.exchanged_values import KeptLookup, Requests
from hotbed.dist.handshake import MERGE, Handshake
from hotbed.dist.ranks import Ranks
from hotbed.dist.shards import TableOnRanks
from hotbed.dist.waiting_gradients import waiting_of
from hotbed.ops.duplicates import sum_duplicates
from hotbed.table.gradients import GradientRows

__all__ = ["merge", "serve_merge"]


class _Merged:
    """Stands for the batches that were merged, as long as a gradient of theirs waits on this rank."""

    lookup: KeptLookup


def merge(ranks: Ranks) -> None:
    """Sum the gradients that wait on each rank by id, in the order of the backwards, and look these ids up in
    place of the batches. Called by all ranks that have batches.

    Batches whose backward is yet to come wait on.
    """
    lookups = ranks.waiting.lookups
    numbers = [*dict.fromkeys(number for one in lookups for number in one.layout.table_numbers)]
    tables = [ranks.table(number) for number in numbers]
    with ranks.reporting(MERGE):
        own = [flag for live in tables for flag in _left_by(live, lookups)]
        any_rank = ranks.handshake(MERGE, own, numbers).values.any(0)
        told = torch.tensor(own, dtype=torch.int64, device="cpu")
        missing = (any_rank & (told == 0)).view(len(tables), -1).tolist()
        found = [
            _summed(live, lookups, of_table) for live, of_table in zip(tables, missing, strict=True)
        ]
    ids = torch.cat([some for some, _ in found])
    layout = ranks.layout([live.place for live in tables])
    by_owner = order_by_owner(layout, ids, [len(some) for some, _ in found])
    opened = ranks.handshake(MERGE, by_owner.counts_to_owners, numbers)
    merged = _Merged()
    merged.lookup = _look_up(ranks, send_ids(ranks, by_owner, opened.values), merged)
    for t, (live, (_, rows)) in enumerate(zip(tables, found, strict=True)):
        if rows is not None:
            positions = by_owner.renumbered(t, torch.arange(len(rows), device="cpu"))
            slots = merged.lookup.first_slots[t] + positions
            waiting_of(live).put(live.parameter, GradientRows(slots, rows, True, False, merged))
    del merged
    _let_go(ranks)


def serve_merge(ranks: Ranks, opened: Handshake) -> None:
    """The part of a rank that has no batch."""
    opened = ranks.serve()  # behind what says which lookups left gradients
    places = [ranks.table(number).place for number in opened.tables]
    _look_up(ranks, send_no_ids(ranks, places, opened.values), None)
    _let_go(ranks)


def _look_up(ranks: Ranks, requests: Requests, merged: _Merged | None) -> KeptLookup:
    fault: Exception | None = None
    owned = None
    try:
        # Not for training: every id got its row when its own batch was looked up. Merging adds none, and does
        # not bring back what was erased since.
        with torch.enable_grad():
            owned = look_up_owned(requests)
    except Exception as error:
        fault = error
    ranks.vote(MERGE, fault=fault)
    return keep(ranks, merged, Fetched(requests, owned, []))


def _let_go(ranks: Ranks) -> None:
    """Release the batches that were merged."""
    ranks.vote(MERGE)
    ranks.waiting.merged()


def _left_by(live: TableOnRanks, lookups: Sequence[KeptLookup]) -> list[bool]:
    """For each lookup, whether this rank has a gradient of the table from it."""
    sources = waiting_of(live).sources_of(live.parameter)
    left = {id(getattr(source, "lookup", None)) for source in sources}
    return [id(lookup) in left for lookup in lookups]


def _summed(
    live: TableOnRanks, lookups: Sequence[KeptLookup], missing: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    """(n,) distinct ids and (n, dim) rows of what waits of a table; None: nothing does.

    Args:
        missing: for each lookup whether other ranks alone have a gradient from it. Those of ids here are
            zeros, as where its owners take it.
    """
    rows = waiting_of(live).in_rows(live)
    number = live.place.number
    untold = [
        lookup.ids_of(lookup.layout.position[number])
        for lookup, is_missing in zip(lookups, missing, strict=True)
        if is_missing
    ]
    if rows is None and not untold:
        return torch.empty(0, dtype=torch.int64, device="cpu"), None
    dim, dtype = live.spec.dim, live.compute_dtype
    if rows is None:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        rows = GradientRows(none, torch.empty((0, dim), dtype=dtype, device="cpu"))
    here = [
        (lookup, lookup.layout.position[number])
        for lookup in lookups
        if number in lookup.layout.position
    ]
    by_owner = [lookup.ids_of(t) for lookup, t in here]
    firsts = torch.tensor([lookup.first_slots[t] for lookup, t in here], device="cpu")  # rising
    counts = torch.tensor([len(ids) for ids in by_owner], device="cpu")
    begins = counts.cumsum(0) - counts
    slots, values = rows.slots, rows.rows
    of_lookup = (torch.searchsorted(firsts, slots, right=True) - 1).clamp(min=0)
    within = slots - firsts[of_lookup]
    inside = (within >= 0) & (within < counts[of_lookup])
    if not bool(inside.all()):
        of_lookup, within, values = of_lookup[inside], within[inside], values[inside]
    ids = torch.cat([torch.cat(by_owner)[begins[of_lookup] + within], *untold])
    zeros = torch.zeros((len(ids) - len(values), dim), dtype=dtype, device="cpu")
    values = torch.cat([values, zeros]) if untold else values
    distinct, positions = torch.empty_like(ids), torch.empty_like(ids)
    given = ids.data_ptr(), len(ids), distinct.data_ptr(), positions.data_ptr()
    count = _core.group_ids(*given)
    _, summed = sum_duplicates(positions, values)  # in the order of the ids, as both first appear
    return distinct[:count], summed
