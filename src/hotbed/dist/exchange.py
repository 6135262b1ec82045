"""A batch across ranks, in steps with values between them:

    order_by_owner(ids) -> IdsByOwner
    send_ids(IdsByOwner, the `IdsByOwner.counts_to_owners` of all ranks) -> Requests
    fetch(Requests) -> Fetched, with the rows that came and, at owners, OwnedRows
    keep(Requests, OwnedRows) -> KeptRows
    KeptRows.give(gradients) -> gradients of each shard of this rank

`order_by_owner` orders ids by their owners, on this rank alone. All ranks call `send_ids`, `fetch` and
`give`: ids travel to their owners, rows come back, and later gradients go the way of the ids. One handshake,
which carries `IdsByOwner.counts_to_owners`, precedes `send_ids` and serves `fetch`, too; another one precedes
the `give` of all lookups in a step.

The values are frozen. What lasts beyond them: `keep` appends to `ranks.waiting`, `Fetched.copy_out` takes
memory of earlier batches from `layout.fetched`, and messages stay only until the ranks next send something.
The core writes and reads messages, all tables at once (`csrc/exchange`), and rows travel in the form of a
codec (`hotbed.dist.row_codecs`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.exchanged_values import (
    Answer,
    IdsByOwner,
    KeptLookup,
    OwnedRows,
    Requests,
)
from hotbed.dist.layout import Layout
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import Messenger
from hotbed.dist.sending import addresses, among, send_gradients, send_rows
from hotbed.dist.shards import ShardedPlace
from hotbed.group.lookup import looked_up
from hotbed.places.host.batch import FlatIds, FlatInputs
from hotbed.table.gradients import GradientRows
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call

__all__ = [
    "Fetched",
    "Given",
    "KeptRows",
    "fetch",
    "first_slots",
    "ids_here",
    "keep",
    "live_shards",
    "look_up_owned",
    "no_ids",
    "order_by_owner",
    "owned_call",
    "places_in_messages",
    "resolve_owned",
    "send_given",
    "send_ids",
    "send_no_ids",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """Rows that this rank has asked for, as the core reads them, and those that it owns."""

    requests: Requests
    owned: OwnedRows | None
    """None: this rank owns no shard."""
    messages: list[Tensor]
    """(bytes,) uint8 from each rank, as the core reads them; with `Stored` these are the messages, which stay
    until the ranks next send something."""

    def copy_out(self) -> _core.FetchedRows:
        """Copy the rows into tables that a batch reads."""
        by_owner = self.requests.by_owner
        kept = by_owner.layout.fetched
        found = kept.pop() if kept else _core.FetchedRows(by_owner.layout.core)
        found.read(self.requests.core, by_owner.ids.data_ptr(), addresses(self.messages))
        return found

    def kept(self, first_slots: list[int]) -> KeptRows:
        """Return what brings gradients of these rows to their owners."""
        return KeptRows(self.requests, self.owned, first_slots)


class Given(NamedTuple):
    """Rows of a table, or their gradients, for its owners."""

    in_core: tuple[int, int, int, int]
    """Addresses of slots, or 0, and rows, how many they are, and the slot of the first id that was asked for;
    good as long as `held` is."""
    held: object
    """What lies there."""

    @classmethod
    def of(cls, rows: Tensor, slots: Tensor | None = None) -> Given:
        """Return (n, dim) contiguous rows.

        Args:
            slots: (n,) int64, each at most once: row i belongs to the id number slots[i] of those asked for,
                and ids without one get zeros. None: each id has one, in their order.
        """
        slots_at = 0 if slots is None else slots.data_ptr()
        return cls((slots_at, rows.data_ptr(), rows.shape[0], 0), (rows, slots))


_NOTHING_GIVEN = 0, 0, 0, 0


def order_by_owner(layout: Layout, ids: Tensor, counts: list[int]) -> IdsByOwner:
    """Order ids by their owners.

    Args:
        layout: of the tables.
        ids: (at least sum of `counts`,) int64 of one table after the other, those of each in any order.
    """
    ordered = torch.empty(sum(counts), dtype=torch.int64, device="cpu")
    new_positions = torch.empty_like(ordered)
    for named in layout.named_owners:
        begin, end = sum(counts[: named.table]), sum(counts[: named.table + 1])
        new_positions[begin:end] = named.of(ids[begin:end])
    numbers = layout.core.order_by_owner(
        ids.data_ptr(), counts, ordered.data_ptr(), new_positions.data_ptr()
    )
    return IdsByOwner(layout, ordered, counts, new_positions, numbers)


def send_ids(ranks: Messenger, by_owner: IdsByOwner, numbers: Tensor) -> Requests:
    """Bring ids to their owners. Called by all ranks.

    Args:
        numbers: (ranks, n) int64, the `IdsByOwner.counts_to_owners` of each rank.
    """
    numbers = numbers.contiguous()
    core = _core.Exchange(by_owner.layout.core, numbers.data_ptr())
    outgoing, coming = core.id_sizes()
    at, layout = by_owner.ids.data_ptr(), by_owner.layout
    members = among(layout, ranks)
    messages = members.reserve(outgoing)
    core.write_ids(at, addresses(messages))
    received = members.send("ids", coming)
    ids = torch.empty(sum(coming) // 8, dtype=torch.int64, device="cpu")
    core.read_ids(at, addresses(received), ids.data_ptr())
    return Requests(by_owner, core, ids)


def no_ids(layout: Layout) -> IdsByOwner:
    """Return what a rank without a batch asks for."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return order_by_owner(layout, none, [0] * len(layout.tables))


def send_no_ids(ranks: Ranks, places: Sequence[ShardedPlace], numbers: Tensor) -> Requests:
    """Take part in `send_ids` of these tables where this rank has no batch."""
    return send_ids(ranks, no_ids(ranks.layout(places)), numbers)


def fetch(ranks: Ranks, requests: Requests, frozen: Sequence[int], training: bool) -> Fetched:
    """Look up what is asked of this rank, and exchange rows. Called by all ranks.

    Args:
        frozen: positions of tables that take no new rows.
        training: True if new ids get a row.
    """
    core = requests.core
    owned: OwnedRows | None = None
    ranks.served += len(requests.ids_here)

    def look_up(buffers: list[Tensor]) -> None:
        nonlocal owned
        owned = look_up_owned(requests, frozen, training, buffers)

    received = send_rows(
        ranks, "rows", requests.by_owner.layout, core.count, core.row_sizes(), look_up
    )
    return Fetched(requests, owned, received)


def look_up_owned(
    requests: Requests,
    frozen: Sequence[int] = (),
    training: bool = False,
    messages: Sequence[Tensor] = (),
) -> OwnedRows | None:
    """Look up the rows that this rank owns.

    Args:
        frozen, training: as of `fetch`.
        messages: buffers, one for each rank, to which its rows are written; none: no rows are wanted.

    Returns:
        None where this rank owns no shard.
    """
    layout, bags = requests.by_owner.layout, ids_here(requests)
    if not messages:
        return resolve_owned(layout, bags, frozen, training, None)
    with places_in_messages(requests.core, messages) as places:
        return resolve_owned(layout, bags, frozen, training, places)


@contextlib.contextmanager
def places_in_messages(
    core: _core.Exchange, messages: Sequence[Tensor]
) -> Iterator[_core.VectorPlaces]:
    """For a ``with`` statement: where to write the rows that ranks ask for, which messages have behind it."""
    wide = _core.block(core.wide_bytes)
    yield core.row_places(addresses(messages), wide.data_ptr())
    if len(wide):
        core.narrow(wide.data_ptr(), addresses(messages))


def ids_here(requests: Requests) -> FlatIds:
    """Return what ranks ask of the shards of this rank, as features."""
    return FlatIds(requests.ids_here, requests.core.asked_here())


def resolve_owned(
    layout: Layout,
    bags: FlatInputs,
    frozen: Sequence[int],
    training: bool,
    places: _core.VectorPlaces | None,
) -> OwnedRows | None:
    """Resolve what ranks ask of the shards that this rank owns.

    Args:
        bags: the features of `Layout.table_of`.
        frozen, training: as of `fetch`.
        places: where vectors go; None: none are wanted.

    Returns:
        None where this rank owns no shard.
    """
    call = owned_call(layout, bags, frozen, training)
    if call is None:
        return None
    resolved = looked_up(call, places)
    return OwnedRows(resolved, [live.generation for live in cast(Sequence[LiveTable], call.live)])


def owned_call(
    layout: Layout, bags: FlatInputs, frozen: Sequence[int], training: bool
) -> Call | None:
    """Return the lookup of what ranks ask of the shards that this rank owns; None: it owns no shard.

    Args:
        bags, frozen, training: as of `resolve_owned`.
    """
    own = live_shards(layout)
    if not own:
        return None
    never = set(frozen)
    here = [at for at, t in enumerate(layout.own_tables) if t in never] if never else []
    return Call(own, layout.table_of, layout.names, bags, here, training)


def live_shards(layout: Layout) -> list[LiveTable]:
    """Return the live tables of the shards that this rank owns."""
    found = [live for ref in layout.own if (live := ref()) is not None]
    assert len(found) == len(layout.own), "their places are held by whoever looks up"
    return found


class KeptRows(KeptLookup):
    """A lookup of distinct ids, whose gradients are those of their rows."""

    kind_given = Given

    def __init__(self, requests: Requests, owned: OwnedRows | None, first_slots: list[int]) -> None:
        self.requests, self.owned, self.first_slots = requests, owned, first_slots
        self.layout, self.counts = requests.by_owner.layout, requests.by_owner.counts

    def ids_of(self, t: int) -> Tensor:
        return self.requests.by_owner.of_table(t)

    def give(
        self,
        ranks: Messenger,
        given: Sequence[object],
        chosen: list[bool],
        seeds: Sequence[int],
    ) -> list[tuple[LiveTable, GradientRows]]:
        return self.give_made(ranks, lambda: given, chosen, seeds)

    def give_made(
        self,
        ranks: Messenger,
        make: Callable[[], Sequence[object]],
        chosen: list[bool],
        seeds: Sequence[int],
    ) -> list[tuple[LiveTable, GradientRows]]:
        """Do as `give`, with what `make` returns; its errors are raised on all ranks."""
        layout = self.layout
        received = send_given(ranks, self.requests, make, chosen, seeds)
        mine = [at for at, t in enumerate(layout.own_tables) if chosen[t]]
        if not mine or self.owned is None:
            return []
        here = self.requests.core.given_places(chosen, False, addresses(received))
        return self.owned.sums(here, received, mine, layout.trainers)


def send_given(
    ranks: Messenger,
    requests: Requests,
    make: Callable[[], Sequence[object]],
    chosen: list[bool],
    seeds: Sequence[int],
) -> list[Tensor]:
    """Send gradients as `KeptRows.give_made` does. Return the messages that came."""
    core = requests.core

    def write(buffers: list[Tensor]) -> None:
        made = cast(Sequence[Given | None], make())  # kept while the core reads it
        places = [_NOTHING_GIVEN if one is None else one.in_core for one in made]
        core.write_given(chosen, False, places, addresses(buffers))

    sizes, layout = core.given_sizes(chosen, False), requests.by_owner.layout
    return send_gradients(ranks, layout, core.count, (chosen, seeds), sizes, write)


def first_slots(layout: Layout, lookups: Sequence[KeptLookup]) -> list[int]:
    """Return, for each table of a layout, the first slot that none of these lookups has."""
    found, sought = [0] * len(layout.position), layout.position
    for earlier in reversed(lookups):  # the last of each table has the last slots
        there = earlier.layout.position
        for number in sought.keys() & there.keys():
            t = there[number]
            found[sought[number]] = earlier.first_slots[t] + earlier.counts[t]
        sought = {number: t for number, t in sought.items() if number not in there}
        if not sought:
            break
    return found


def keep(ranks: Ranks, batch: object | None, answer: Answer) -> KeptLookup:
    """Have the ranks keep a lookup for the gradients of a batch. `batch`: None where this rank has none."""
    slots = first_slots(answer.requests.by_owner.layout, ranks.waiting.lookups)
    made = answer.kept(slots)
    ranks.waiting.add(batch, made)
    return made
