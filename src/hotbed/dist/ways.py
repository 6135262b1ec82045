"""How a lookup asks for each table, the same on all ranks: for rows, or for bags that the owners have pooled.

A bag of one id is a row, and distinct rows are looked up once: they come here. Vectors of long bags are fewer
bytes than their rows. Each rank judges by the counts of its own batch; bags are pooled by owners where all
ranks would have it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hotbed import _core
from hotbed.dist.errors import PeerError
from hotbed.dist.handshake import Handshake
from hotbed.dist.parts import Asked, PartsOfCall
from hotbed.dist.ranks import Ranks
from hotbed.dist.rows_batch import Direct, RowsOfCall
from hotbed.dist.shards import ShardedPlace
from hotbed.sharding.kind import LEAST_IDS
from hotbed.table.lookups import Call

__all__ = [
    "AHEAD",
    "WHOLE",
    "RowsTold",
    "TellsNumbers",
    "agree",
    "bits",
    "other_ways",
    "refuse_other_modes",
    "room_of",
    "round_of_all",
]

AHEAD = 3
"""Numbers before the modes of a lookup: the round in which its ids were sent ahead, or 0, or `WHOLE`; 1 if
rows that came ahead are good, else 0; the round of the next batch if rows can be sent ahead for it, or 0."""
WHOLE = -1
"""No ids travel, as each rank has those of the tables that it keeps (`hotbed.dist.whole_batches`)."""
BITS = 62
"""Of tables in a number."""


class TellsNumbers(Protocol):
    """Sends numbers of this rank to all, as many on each. Returns those of each rank, (ranks, n) int64, and
    which ranks have no batch and have sent none."""

    def __call__(self, numbers: list[int]) -> tuple[Tensor, list[bool]]: ...


def agree(
    ranks: Ranks,
    call: Call,
    given: _core.Batch,
    places: Sequence[ShardedPlace],
    modes: Sequence[int],
    tell: TellsNumbers,
) -> tuple[Asked, Tensor]:
    """Return what this rank asks of owners, as all do, and the numbers of all ranks, (ranks, n) int64. Called
    by all ranks.

    Args:
        given: the checked batch of the call; places: of its tables.
        modes: what must be alike on all ranks, of a lookup.

    Raises:
        PeerError: ranks want different things; on all ranks.
    """
    ways, room, layout = ways_of(call, places), room_of(call, places), ranks.layout(places)
    begin = AHEAD + len(modes) + len(ways)
    while True:
        asked = (
            PartsOfCall(ranks, call, given, places, ways)
            if layout.by_machine or any(ways)
            else RowsOfCall(ranks, call, given, Direct(layout))
        )
        told = [*[0] * AHEAD, *modes, *ways, *asked.numbers]
        told += [0] * (AHEAD + len(modes) + room - len(told))
        values, ended = tell(told)
        refuse_other_modes(values, ended, ranks.rank, len(modes))
        while bool(
            values[:, 0].any()
        ):  # a rank has sent its ids ahead, and asks anew, as not all have
            values, ended = tell(told)
        others = other_ways(values, ended, begin - len(ways), begin)
        if others is None:
            return asked, values[:, begin : begin + len(asked.numbers)]
        ways = others


def room_of(call: Call, places: Sequence[ShardedPlace]) -> int:
    """Return how many numbers ranks tell each other in a lookup besides its modes, at most.

    Args:
        places: of the tables.
    """
    features, room = [0] * len(places), 0
    for t in call.table_of:
        features[t] += 1
    for count, place in zip(features, places, strict=True):
        room += 1 + max(1, count) * (place.owners + 1)
    return room


def ways_of(call: Call, places: Sequence[ShardedPlace]) -> list[int]:
    """Return the ways that this rank would have: for each table of a call, how many features it has if owners
    pool their bags, else 0.

    Args:
        places: of the tables.
    """
    count = len(places)
    if {bag.fixed for bag in call.bags} <= {1}:
        return [0] * count
    features, ids, bags = [0] * count, [0] * count, [0] * count
    weighed = set()
    for bag, t in zip(call.bags, call.table_of, strict=True):
        features[t] += 1
        ids[t] += bag.ids.shape[0]
        bags[t] += bag.bags
        if bag.weights is not None:
            weighed.add(t)
    ways = [0] * count
    for t, place in enumerate(places):
        least = LEAST_IDS * place.bag_parts * bags[t]
        if 0 < least <= ids[t] and t not in weighed:
            ways[t] = features[t]
    return ways


def other_ways(values: Tensor, ended: Sequence[bool], begin: int, end: int) -> list[int] | None:
    """Return the ways of all ranks where these differ from those of one, by which they look up anew.

    Args:
        values: (ranks, n) of all ranks; ended: those without batches.
        begin, end: of the values that are ways.

    Raises:
        PeerError: a rank has other features of a table.
    """
    told: list[list[int]] = values[:, begin:end].tolist()
    for rank in range(len(told) - 1, -1, -1):
        if ended[rank]:
            del told[rank]
    if told.count(told[0]) == len(told):
        return None
    agreed = []
    for of_table in zip(*told, strict=True):
        if len({way for way in of_table if way}) > 1:
            raise PeerError(
                "Ranks look up other features of a table. All must look up the same features."
            )
        agreed.append(min(of_table))
    return agreed


def refuse_other_modes(values: Tensor, ended: Sequence[bool], mine: int, count: int) -> None:
    """Raise PeerError where ranks with batches look up in another mode than rank `mine`.

    Args:
        values, ended: as of `other_ways`.
        count: of the values that are modes.
    """
    whole = (values[:, 0] == WHOLE).tolist()
    for rank, one in enumerate(whole):
        if not ended[rank] and one != whole[mine]:
            raise PeerError(
                f"Rank {rank if one else mine} gives a batch of hotbed.dist.owned, and rank "
                f"{mine if one else rank} one of its own samples. Wrap the loaders of all ranks alike."
            )
    told: list[list[int]] = values[:, AHEAD : AHEAD + count].tolist()
    for rank, reported in enumerate(told):
        if not ended[rank] and reported != told[mine]:
            raise PeerError(
                f"Rank {rank} looks up in another mode than rank {mine}: model.train() or eval(), "
                "requires_grad of tables, and torch.no_grad() must be alike on all ranks. All evaluate "
                "together, each its samples; hotbed.dist.even(loader) ends them together."
            )


def round_of_all(values: Tensor, hosts: Sequence[int]) -> int:
    """Return the round in which all ranks have sent their ids ahead, memory hosts aside; 0: in none.

    Args:
        values: (ranks, n) int64 that ranks tell in a lookup.
    """
    told = {number for rank, number in enumerate(values[:, 0].tolist()) if rank not in hosts}
    return told.pop() if len(told) == 1 else 0


class RowsTold(NamedTuple):
    """What ranks tell of rows that are sent ahead, in a lookup of a batch whose ids were."""

    are_good: bool
    """True if rows of the batch that have come are good on all ranks."""
    next_round: int
    """Round of the batch of which rows are sent now; 0: none are."""

    @classmethod
    def of(cls, opened: Handshake, hosts: Sequence[int]) -> RowsTold:
        """`hosts`: memory hosts, which tell nothing but that they hold rows back."""
        told = [
            numbers
            for rank, numbers in enumerate(opened.values[:, 1:AHEAD].tolist())
            if rank not in hosts
        ]
        rounds = {then for _, then in told}
        can = not opened.holds_back
        return cls(
            can and all(good for good, _ in told), rounds.pop() if can and len(rounds) == 1 else 0
        )


def bits(chosen: Sequence[int], count: int) -> list[int]:
    """Return which of `count` tables are chosen, `BITS` in a number."""
    words = [0] * -(-count // BITS)
    for t in set(chosen):
        words[t // BITS] |= 1 << t % BITS
    return words
