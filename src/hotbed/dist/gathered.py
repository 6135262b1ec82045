"""All rows of a table that ranks share, brought together in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import bytes_of, exchange, numbers_in
from hotbed.dist.shards import Shard, ShardedPlace
from hotbed.errors import HotbedError, TableError
from hotbed.tables import Table

__all__ = ["Gathered", "gather_asked", "gathered"]

_KIND = "a copy of rows"
_ROWS_AT_ONCE = 1 << 14


class Gathered(NamedTuple):
    """Stored rows of a table."""

    ids: Tensor
    """(n,) int64, rising."""
    weights: Tensor
    """(n, dim)."""
    states: list[Tensor]
    """(n, dim) or (n, 1) each; none where they were not wanted."""


def gathered(
    ranks: Ranks, place: ShardedPlace, *, states: bool, everywhere: bool
) -> Gathered | None:
    """All rows of a table, as the last step has left them. Called by all ranks.

    Args:
        states: whether optimizer states come, too; then of stored rows only.
        everywhere: whether to all ranks; else None comes back on all but rank 0.

    Raises:
        TableError: they do not fit in memory.
    """
    ranks.handshake(_KIND, [states, everywhere], [place.number])
    return gather_asked(ranks, place, states=states, everywhere=everywhere)


def gather_asked(
    ranks: Ranks, place: ShardedPlace, *, states: bool, everywhere: bool
) -> Gathered | None:
    """Do the same where all ranks have told each other that they do."""
    receivers = set(range(ranks.size)) - set(ranks.hosts) if everywhere else {0}
    wants = ranks.rank in receivers
    ids = _ids(ranks, place, receivers, stored=states)
    spec, widths = place.spec, place.core.state_widths() if states else []
    fault: TableError | None = None
    needed = len(ids) * (spec.dim * spec.dtype.itemsize + 16)
    needed += len(ids) * sum(widths) * spec.compute_dtype.itemsize
    if wants and needed > (free := _core.available_memory()):
        fault = TableError(
            f"Table {spec.name!r}: a copy of all rows would take {needed} bytes, and {free} are free. Read a "
            "part of them with lookup(ids), or save a checkpoint, of which each rank writes its part."
        )
    ranks.handshake(_KIND, fault=fault, tables=[place.number])
    size = len(ids) if wants else 0
    found = Gathered(
        ids,
        torch.empty((size, spec.dim), dtype=spec.dtype, device="cpu"),
        [torch.empty((size, width), dtype=spec.compute_dtype, device="cpu") for width in widths],
    )
    absent = torch.ones(size, dtype=torch.bool, device="cpu")
    for shard, rows in _all_records(ranks, place, receivers, states=states):
        rows, at = _known(rows, shard, ids)
        absent[at] = False
        columns = shard.part.columns
        found.weights[at, columns] = rows.weights
        for state, some in zip(found.states, rows.states, strict=True):
            if state.shape[1] == 1:
                state[at] = some
            else:
                state[at, columns] = some
    _read_first_values(ranks, place, found, torch.nonzero(absent).flatten())
    return found if wants else None


def _known(rows: Gathered, shard: Shard, ids: Tensor) -> tuple[Gathered, Tensor]:
    """Return the rows of a shard whose ids are wanted, and where they are.

    Steps move rows that are not stored, too.
    """
    own = shard.part.origin.ids_in_table(rows.ids)
    at = torch.searchsorted(ids, own)
    if not len(ids):
        here = torch.zeros(len(own), dtype=torch.bool, device="cpu")
    else:
        here = ids[at.clamp(max=len(ids) - 1)] == own
    if bool(here.all()):
        return rows, at
    return Gathered(rows.ids[here], rows.weights[here], [s[here] for s in rows.states]), at[here]


def _read_first_values(ranks: Ranks, place: ShardedPlace, found: Gathered, absent: Tensor) -> None:
    """The rows of a static table that are stored nowhere. `absent`: their positions."""
    counts = ranks.handshake(_KIND, [len(absent)], [place.number]).values
    for begin in range(0, int(counts.max()), _ROWS_AT_ONCE):
        at = absent[begin : begin + _ROWS_AT_ONCE]
        found.weights[at] = place.read(found.ids[at])


def _spoken(place: ShardedPlace) -> list[Shard]:
    """Shards that have each element of the table once."""
    return [shard for shard in place.shards if not shard.replica or shard.rank == 0]


def _ids(ranks: Ranks, place: ShardedPlace, receivers: set[int], *, stored: bool) -> Tensor:
    """(n,) ids, rising, on receivers; of a static table all, or only those whose rows are `stored`."""
    own = [
        shard.part.origin.ids_in_table(live.stored_ids() if stored else live.ids())
        for shard, live in place.own.items()
        if shard in _spoken(place) and shard.part.origin.column == 0
    ]
    mine = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *own])
    counts = ranks.handshake(_KIND, [len(mine)], [place.number]).values[:, 0].tolist()
    outgoing = [[bytes_of(mine)] if to in receivers else [] for to in range(ranks.size)]
    sizes = [8 * count if ranks.rank in receivers else 0 for count in counts]
    blocks = exchange(ranks, _KIND, outgoing, sizes)
    return torch.cat([numbers_in(block, torch.int64) for block in blocks]).sort().values


def _all_records(
    ranks: Ranks, place: ShardedPlace, receivers: set[int], *, states: bool
) -> Iterator[tuple[Shard, Gathered]]:
    """Chunk after chunk of all ranks, each rank's next at once, until no rank has more."""
    spec = place.spec
    shards = _spoken(place)
    wants = ranks.rank in receivers
    streams = [
        (s, live.records(states=states))
        for s, shard in enumerate(shards)
        for own, live in place.own.items()
        if own == shard
    ]
    widths = place.core.state_widths() if states else []
    while True:
        fault: HotbedError | None = None
        chunk: tuple[int, Gathered] | None = None
        try:
            while streams and chunk is None:
                s, stream = streams[0]
                rows = next(stream, None)
                if rows is None:
                    streams = streams[1:]
                else:
                    assert rows.weights is not None
                    chunk = s, Gathered(rows.ids, rows.weights, list(rows.states or ()))
        except HotbedError as error:
            fault = error
        said = [-1, 0] if chunk is None else [chunk[0], len(chunk[1].ids)]
        reported = ranks.handshake(_KIND, said, [place.number], fault).values.tolist()
        if all(s < 0 for s, _ in reported):
            return
        tensors = [] if chunk is None else [chunk[1].ids, chunk[1].weights, *chunk[1].states]
        raw = [bytes_of(tensor) for tensor in tensors]
        outgoing = [raw if to in receivers else [] for to in range(ranks.size)]
        shapes = [
            _shapes(shards[s], spec, count, widths) if s >= 0 else [] for s, count in reported
        ]
        sizes = [sum(_bytes(*one) for one in of_rank) if wants else 0 for of_rank in shapes]
        for (s, _), block, of_rank in zip(
            reported, exchange(ranks, _KIND, outgoing, sizes), shapes, strict=True
        ):
            if s >= 0 and wants:
                pieces = torch.split(block, [_bytes(*one) for one in of_rank])
                ids, weights, *values = (
                    numbers_in(piece, dtype).view(shape)
                    for piece, (shape, dtype) in zip(pieces, of_rank, strict=True)
                )
                yield shards[s], Gathered(ids, weights, values)


def _shapes(
    shard: Shard, spec: Table, count: int, widths: list[int]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes of a chunk's ids, weights and states."""
    dim = shard.part.dim
    return [
        ((count,), torch.int64),
        ((count, dim), spec.dtype),
        *(((count, 1 if w == 1 else dim), spec.compute_dtype) for w in widths),
    ]


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for side in shape:
        size *= side
    return size
