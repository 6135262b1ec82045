"""Ids of the ranks of a machine are brought together before they cross to another machine.

A rank asks the owners of its own local rank, one on each machine, for all ranks of its machine. Ids go to
that rank of the own machine ("inside"), which asks each owner once for each of them ("across"). Rows come
back the same way. So do gradients, later, which it sums in the order of the local ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.errors import PeerError, is_known_to_all
from hotbed.dist.exchange import (
    Fetched,
    Given,
    KeptRows,
    ids_here,
    order_by_owner,
    places_in_messages,
    send_given,
    send_ids,
)
from hotbed.dist.exchanged_values import (
    Answer,
    Gathering,
    IdsByOwner,
    KeptLookup,
    OwnedInputs,
    Requests,
)
from hotbed.dist.layout import LaidShard, LaidTable, Layout
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import WORD, Messenger
from hotbed.dist.row_codecs import CODECS, Codecs
from hotbed.dist.rows_ahead import FetchedInParts, SentInParts
from hotbed.dist.rows_batch import Sent, SentDirectly
from hotbed.dist.sending import addresses, among, send_written
from hotbed.dist.shards import ShardedPlace
from hotbed.places.host.batch import FlatIds
from hotbed.table.gradients import GradientRows
from hotbed.table.live import LiveTable
from hotbed.table.place_factory import make_core

__all__ = ["ByMachine"]

_INSIDE = " inside"
"""Behind the names of bytes that do not leave a machine."""
_STORED = Codecs(CODECS["stored"], CODECS["stored"])


class ByMachine:
    """`hotbed.dist.rows_batch.Route` by way of a rank of the own machine.

    Attributes:
        layout: of what is exchanged inside: each shard is asked of the local rank of its owner.
        across: of what is exchanged across; its tables are the shards of owners with this rank's local rank.
        table_of: of each of these, the position of the table that it is a shard of.
    """

    def __init__(self, ranks: Ranks, places: Sequence[ShardedPlace]) -> None:
        """`places`: of the tables."""
        machines = ranks.machines
        assert machines is not None
        own = machines.local_rank(machines.rank)
        inside: list[LaidTable] = []
        shards: list[list[LaidTable]] = [[] for _ in machines.here]
        self.table_of: list[int] = []
        for t, place in enumerate(places):
            laid = LaidTable.of(place)
            to = [machines.local_rank(one.shard.rank) for one in laid.shards]
            for local, one in zip(to, laid.shards, strict=True):
                number, owner = len(shards[local]), machines.machine(one.shard.rank)
                shards[local].append(_alone(number, one, owner, laid.codecs))
                self.table_of += [t] if local == own else []
            asked = [
                one._replace(shard=one.shard._replace(rank=local), live=None)
                for local, one in zip(to, laid.shards, strict=True)
            ]
            inside.append(laid._replace(shards=asked, codecs=_STORED))
        self.here, self.others = machines.here, machines.across
        self.layout = Layout(own, len(self.here), 1, inside, self.here, _INSIDE)
        machine = machines.machine(machines.rank)
        self.across = Layout(machine, len(self.others), ranks.trainers, shards[own], self.others)
        self.across.can_fail = any(place.codecs.rows.can_fail for place in places)
        self._specs = [table.spec for table in shards[own]]
        self._cores = [make_core(spec, 0, elsewhere=True) for spec in self._specs]

    def send(self, messenger: Gathering, by_owner: IdsByOwner, numbers: Tensor) -> Sent:
        here, count = self.here, len(self._cores)
        numbers = numbers.contiguous()
        inside = send_ids(messenger, by_owner, numbers[here.start : here.stop])
        asked = ids_here(inside)
        of_features = [t for t in range(count) for _ in here]
        given = asked.core_batch(self._cores, of_features)
        ids = torch.empty(len(inside.ids_here), dtype=torch.int64, device="cpu")
        inverse = torch.empty_like(ids)
        merged = order_by_owner(
            self.across, ids, _core.distinct_ids(given, ids.data_ptr(), inverse.data_ptr())
        )
        across = _send_at_most(messenger, merged, self._most(numbers))
        return _SentByMachine(self, inside, asked, given, inverse, SentDirectly(across))

    def _most(self, numbers: Tensor) -> Tensor:
        """Return (machines, n) int64, for each table of `across` the most ids that a machine asks for: no two
        of its ranks ask for the same one. `numbers`: as of `send`."""
        size = len(self.here)
        of_machines = [
            _core.Exchange(self.layout.core, some.data_ptr()).asked_here()
            for some in numbers.split_with_sizes([size] * len(self.others))
        ]
        counts = torch.tensor(of_machines, dtype=torch.int64, device="cpu")
        return counts.view(len(of_machines), -1, size).sum(-1)

    def frozen_across(self, frozen: Sequence[int]) -> list[int]:
        """Return the tables of `across` that take no new rows."""
        return [at for at, t in enumerate(self.table_of) if t in frozen]

    def sums(
        self, batch: _core.Batch, places: _core.VectorPlaces, chosen: list[bool]
    ) -> list[Given]:
        """Return the sums, by id asked for across, of gradients that have come inside.

        Args:
            batch: of the ids that were asked for inside, over those asked for across.
            places: where the gradients are.
            chosen: for each table of `across` whether any came.
        """
        sums, rows_at, slots_at = [], [], []
        for spec, count, some in zip(self._specs, batch.unique_counts(), chosen, strict=True):
            n = count if some else 0
            rows = torch.empty((n, spec.dim), dtype=spec.compute_dtype, device="cpu")
            slots = torch.empty(n, dtype=torch.int64, device="cpu")
            sums.append(Given.of(rows, slots))
            rows_at.append(rows.data_ptr() if some else 0)
            slots_at.append(slots.data_ptr() if some else 0)
        batch.find_slots()
        batch.reduce(places, rows_at, slots_at)
        return sums


def _send_at_most(messenger: Messenger, by_owner: IdsByOwner, most: Tensor) -> Requests:
    """Do as `send_ids`, where ranks have not told their counts, which go along with the ids.

    Args:
        most: (ranks, n) int64, at least the counts of each, for which messages have room.
    """
    layout = by_owner.layout
    own = torch.tensor(by_owner.counts_to_owners, dtype=torch.int64, device="cpu")
    outgoing, coming = _core.Exchange(layout.core, most.data_ptr()).id_sizes()
    counts = torch.zeros_like(most)
    counts[layout.rank] = own
    members, begin = among(layout, messenger), own.nbytes
    messages = members.reserve([begin + size for size in outgoing])
    for message in messages:
        message[:begin].view(torch.int64)[:] = own
    at, here = by_owner.ids.data_ptr(), _core.Exchange(layout.core, counts.data_ptr())
    here.write_ids(at, [begin + address for address in addresses(messages)])
    received = members.send("ids", [begin + size for size in coming])
    counts = torch.stack([message[:begin].view(torch.int64) for message in received])
    if bool((counts > most).any()):  # the core would read beyond its message
        raise PeerError("Another machine asks for more ids than its ranks have announced.")
    core = _core.Exchange(layout.core, counts.data_ptr())
    ids = torch.empty(sum(core.id_sizes()[1]) // WORD, dtype=torch.int64, device="cpu")
    core.read_ids(at, [begin + address for address in addresses(received)], ids.data_ptr())
    return Requests(by_owner, core, ids)


def _alone(number: int, one: LaidShard, machine: int, codecs: Codecs) -> LaidTable:
    """Return a shard as a table of its own, of which a rank on this machine has all."""
    spec = dataclasses.replace(one.shard.part, combiner="none", padding_idx=None)
    shard = one.shard._replace(rank=machine, part=spec, owner=0)
    return LaidTable(number, spec, None, codecs, [LaidShard(shard, 0, 1, 0, one.live)])


class _SentByMachine(NamedTuple):
    """`hotbed.dist.rows_batch.Sent`."""

    route: ByMachine
    inside: Requests
    asked: FlatIds
    """Inputs of `given`, which reads them."""
    given: _core.Batch
    """Of what was asked inside."""
    inverse: Tensor
    """For each id of these, its position among the distinct ones of its shard."""
    across: SentDirectly | SentInParts

    def owned(self, frozen: Sequence[int]) -> OwnedInputs:
        return self.across.owned(self.route.frozen_across(frozen))

    @property
    def requests(self) -> Requests:
        return self.inside

    @property
    def at_owners(self) -> Requests:
        return self.across.at_owners

    def in_parts(
        self, messenger: Gathering, before: Requests, tables: Sequence[int]
    ) -> tuple[Sent, SentInParts]:
        _, made = self.across.in_parts(messenger, before, tables)
        return self._replace(across=made), made

    def fetch(self, ranks: Ranks, frozen: Sequence[int], training: bool, wanted: bool) -> Answer:
        route, inside = self.route, self.inside.core
        never = route.frozen_across(frozen)
        came = self.across.fetch(ranks, never, training, wanted)
        batch: _core.Batch | None = None

        def write(messages: list[Tensor]) -> None:
            nonlocal batch
            rows, merged = came.copy_out(), self.at_owners.by_owner
            positions = merged.new_positions.data_ptr(), self.inverse.data_ptr()
            batch = rows.batch(self.given, merged.counts, *positions)
            batch.resolve(False, wanted, never)
            with places_in_messages(inside, messages) as places:
                batch.pool(places)
            route.across.give_back(rows)  # a backward needs the batch, and not them

        # No exchange comes behind it, in which the other machines would hear of a fault.
        here = among(route.layout, ranks, tells_all=True)
        received = send_written(here, "rows", inside.row_sizes(), write)
        assert batch is not None
        return _FetchedByMachine(Fetched(self.inside, None, received), self, came, batch)


class _FetchedByMachine(NamedTuple):
    """`hotbed.dist.exchanged_values.Answer`."""

    fetched: Fetched
    sent: _SentByMachine
    came: Fetched | FetchedInParts
    """Across."""
    batch: _core.Batch

    @property
    def requests(self) -> Requests:
        return self.fetched.requests

    def copy_out(self) -> _core.FetchedRows:
        return self.fetched.copy_out()

    def kept(self, first_slots: list[int]) -> KeptLookup:
        across = self.came.kept([0] * len(self.sent.route.table_of))
        return _KeptByMachine(self.sent, across, self.batch, first_slots)


class _KeptByMachine(KeptLookup):
    """A lookup whose gradients are summed on each machine, and then by the owners."""

    kind_given = Given

    def __init__(
        self, sent: _SentByMachine, across: KeptRows, batch: _core.Batch, first_slots: list[int]
    ) -> None:
        self._sent, self._batch, self.first_slots = sent, batch, first_slots
        self.layout, self.counts = sent.route.layout, sent.inside.by_owner.counts
        self._across = across

    @property
    def needs_seeds(self) -> bool:
        return self._across.needs_seeds  # inside, nothing is encoded

    def ids_of(self, t: int) -> Tensor:
        return self._sent.inside.by_owner.of_table(t)

    def give(
        self,
        ranks: Messenger,
        given: Sequence[object],
        chosen: list[bool],
        seeds: Sequence[int],
    ) -> list[tuple[LiveTable, GradientRows]]:
        core, route = self._sent.inside.core, self._sent.route
        received: list[Tensor] = []
        fault: Exception | None = None
        try:
            received = send_given(ranks, self._sent.inside, lambda: given, chosen, seeds)
        except Exception as error:
            if is_known_to_all(error):
                raise
            fault = error  # other machines hear of it across
        chosen_across = [chosen[t] for t in route.table_of]

        def sums() -> Sequence[object]:
            if fault is not None:
                raise fault
            places = core.given_places(chosen, False, addresses(received))
            return route.sums(self._batch, places, chosen_across)

        of_shards = [seeds[t] for t in route.table_of]
        return self._across.give_made(ranks, sums, chosen_across, of_shards)
