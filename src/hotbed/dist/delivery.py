"""Rows that a user gives, brought to their owners, and rows that a user asks for by id."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.dist.exchange import Given, live_shards
from hotbed.dist.exchanged_values import Requests
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import bytes_of, rounded
from hotbed.dist.sending import addresses, send_written
from hotbed.table.live import LiveTable
from hotbed.table.locks import reading

__all__ = ["deliver", "fetch_by_id", "owned_ids"]


def deliver(
    ranks: Ranks, requests: Requests, rows: Tensor
) -> list[tuple[LiveTable, Tensor, Tensor]]:
    """Bring rows of the only table to their owners. Called by all ranks.

    Args:
        rows: (n, dim), as they are stored, of the ids as they were given to `order_by_owner`.

    Returns:
        For each shard of this rank: its live table, (m,) its ids, one rank's after the other's, and
        (m, columns) rows.
    """
    given = Given.of(rows.contiguous(), requests.by_owner.new_positions)
    received = send_written(
        ranks,
        "rows",
        requests.core.given_sizes([True], True),
        lambda messages: requests.core.write_given(
            [True], True, [given.in_core], addresses(messages)
        ),
    )
    begins = [0] * ranks.size
    found = []
    for live, ids, of_ranks in owned_ids(requests):
        pieces, dim = [], live.spec.dim
        for rank, count in enumerate(of_ranks):
            begin, length = begins[rank], count * dim * rows.itemsize
            piece = received[rank][begin : begin + length]
            pieces.append(piece.view(rows.dtype).view(count, dim))
            begins[rank] += rounded(length)
        found.append((live, ids, torch.cat(pieces)))
    return found


def fetch_by_id(ranks: Ranks, requests: Requests) -> list[Tensor]:
    """Read the rows that were asked for, as their owners' ``lookup`` does, and return the messages that came,
    as the core reads them. Called by all ranks."""

    def write(room: list[Tensor]) -> None:
        begins = [0] * ranks.size
        layout = requests.by_owner.layout
        shards = [shard for _, shard, _ in layout.shards if shard.rank == layout.rank]
        for shard, (live, ids, of_ranks) in zip(shards, owned_ids(requests), strict=True):
            live.ready()
            with reading([live]):
                rows = live.place.read(ids)
            for to, piece in enumerate(rows.split_with_sizes(of_ranks)):
                if not shard.replica or to == ranks.rank:  # which reads its own copy
                    raw = bytes_of(piece)
                    room[to][begins[to] : begins[to] + len(raw)] = raw
                    begins[to] += rounded(len(raw))

    return send_written(ranks, "rows", requests.core.row_sizes(), write)


def owned_ids(requests: Requests) -> list[tuple[LiveTable, Tensor, list[int]]]:
    """For each shard of this rank: its live table, (m,) the ids asked of it, and how many by each rank."""
    layout, counts = requests.by_owner.layout, requests.core.asked_here()
    size = layout.size
    of_shards = [counts[at : at + size] for at in range(0, len(counts), size)]
    ids = requests.ids_here.split_with_sizes([sum(some) for some in of_shards])
    return list(zip(live_shards(layout), ids, of_shards, strict=True))
