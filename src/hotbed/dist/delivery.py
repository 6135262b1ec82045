"""Rows that a user gives, brought to their owners."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.dist.exchange import Given, own_tables, to_owners
from hotbed.dist.exchanged_values import Announced
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import rounded
from hotbed.dist.row_codecs import STORED
from hotbed.dist.row_codecs.codec import Travel
from hotbed.table.live import LiveTable

__all__ = ["deliver", "owned_ids"]


def deliver(
    ranks: Ranks, announced: Announced, rows: Tensor
) -> list[tuple[LiveTable, Tensor, Tensor]]:
    """Bring rows of the only table to their owners. Called by all ranks.

    Args:
        rows: (n, dim), as they are stored, of the ids as they were given to `ask`.

    Returns:
        For each shard of this rank: its live table, (m,) its ids, one rank's after the other's, and
        (m, columns) rows.
    """
    travel = Travel(announced.core, announced.asked.layout, True, [True])
    given = Given(rows.contiguous(), announced.asked.moved).in_core()
    received = to_owners(ranks, "rows", travel, STORED, [given], stored=True)
    begins = [0] * ranks.size
    found = []
    for live, ids, of_ranks in owned_ids(announced):
        pieces, dim = [], live.spec.dim
        for rank, count in enumerate(of_ranks):
            begin, length = begins[rank], count * dim * rows.itemsize
            piece = received[rank][begin : begin + length]
            pieces.append(piece.view(rows.dtype).view(count, dim))
            begins[rank] += rounded(length)
        found.append((live, ids, torch.cat(pieces)))
    return found


def owned_ids(announced: Announced) -> list[tuple[LiveTable, Tensor, list[int]]]:
    """For each shard of this rank: its live table, (m,) the ids asked of it, and how many by each rank."""
    layout, counts = announced.asked.layout, announced.core.asked_here()
    size = layout.size
    of_shards = [counts[at : at + size] for at in range(0, len(counts), size)]
    ids = announced.ids_here.split_with_sizes([sum(some) for some in of_shards])
    return list(zip(own_tables(layout), ids, of_shards, strict=True))
