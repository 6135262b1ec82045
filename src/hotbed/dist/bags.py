"""Bags that the owners of their rows pool: ids and lengths travel to them, vectors come back, and gradients
of vectors go the way of the ids.

    OrderedBags of this rank, the numbers of all -> `send_bags` -> BagRequests
    `pool_bags` -> Answer, with the vectors that came
    `keep_bags` -> KeptBags
    KeptBags.give(gradients) -> gradients of each shard of this rank

Owners sum what they have of a bag; who asks adds sums up where rows are split, and divides. What is frozen,
and what lasts, is as in `hotbed.dist.exchange`; the core writes and reads messages (`csrc/exchange/bags`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.exchange import first_slots, resolve_owned
from hotbed.dist.exchanged_values import (
    Gathering,
    KeptLookup,
    OwnedInputs,
    OwnedRows,
    PendingOnRanks,
)
from hotbed.dist.layout import Layout
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import Messenger
from hotbed.dist.sending import addresses, send_gradients, send_rows, send_written
from hotbed.dist.shards import ShardedPlace
from hotbed.places.host.batch import FlatBags, FlatInputs, OnHost, as_vectors, places_in
from hotbed.table.gradients import GradientRows
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call
from hotbed.table.resolved import Columns
from hotbed.table.sparse_gradient import TableGradient

__all__ = [
    "Answer",
    "BagGradients",
    "BagRequests",
    "BagsBatch",
    "BagsOfCall",
    "KeptBags",
    "keep_bags",
    "pool_bags",
    "send_bags",
    "width",
]


def width(layout: Layout) -> int:
    """Return how many numbers a rank tells of its bags."""
    return _core.BagExchange.width(layout.core)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Vectors of this rank's bags, and what owners keep of them."""

    layout: Layout
    own: _core.OrderedBags
    """Bags of this rank."""
    core: _core.BagExchange
    owned: OwnedRows | None
    """None: this rank owns no shard."""
    messages: list[Tensor]
    """(bytes,) uint8 from each rank, with the vectors."""


@dataclasses.dataclass(frozen=True, slots=True)
class BagRequests:
    """Bags of all ranks, at the owners of their rows."""

    layout: Layout
    own: _core.OrderedBags
    """Bags of this rank."""
    core: _core.BagExchange
    bags_here: FlatInputs
    """What ranks ask of the shards of this rank."""
    count: int
    """Ids in these bags."""


class BagsOfCall:
    """Bags of a call, which the owners are to pool. Attributes and methods are those of
    `hotbed.dist.parts.Asked`."""

    def __init__(
        self,
        ranks: Ranks,
        call: Call,
        given: _core.Batch,
        features: Sequence[int],
        places: Sequence[ShardedPlace],
    ) -> None:
        """`given`: a checked batch in which these features are those of the call. `places`: of the call's
        tables."""
        self._ranks, self._call = ranks, call
        self._layout = ranks.layout([places[t] for t in call.table_of])
        self._own = _core.OrderedBags(self._layout.core, given, features)
        self._requests: BagRequests | None = None
        self.numbers = self._own.numbers

    def send(self, messenger: Gathering, numbers: Tensor) -> None:
        self._requests = send_bags(messenger, self._layout, self._own, numbers)

    def owned(self) -> list[OwnedInputs]:
        assert self._requests is not None
        return [OwnedInputs(self._layout, self._requests.bags_here, self._call.frozen)]

    def by_rows(self) -> list[NoReturn]:
        return []

    def use(self, call: Call, given: _core.Batch) -> None:
        """`given` is not read: these are copies of its ids."""
        self._call = call

    def fetch(self, wanted: bool) -> BagsBatch:
        ranks, call = self._ranks, self._call
        requests, self._requests = self._requests, None
        assert requests is not None
        answer = pool_bags(ranks, requests, call.frozen, call.training)
        made = BagsBatch(call, answer, wanted)
        if wanted:
            made.lookup = keep_bags(ranks, made, answer)
        return made


def send_bags(
    ranks: Messenger, layout: Layout, own: _core.OrderedBags, numbers: Tensor
) -> BagRequests:
    """Bring bags to the owners of their rows. Called by all ranks.

    Args:
        own: bags of this rank.
        numbers: (ranks, n) int64, those of the bags of each rank.
    """
    numbers = numbers.contiguous()
    core = _core.BagExchange(layout.core, numbers.data_ptr())
    received = send_written(
        ranks, "ids", core.id_sizes(), lambda messages: core.write_ids(own, addresses(messages))
    )
    shapes = core.here()
    ids, offsets = (
        torch.empty(count, dtype=torch.int64, device="cpu")
        for count in (sum(n for n, _, _ in shapes), sum(b + 1 for _, b, edges in shapes if edges))
    )
    core.read_ids(own, addresses(received), ids.data_ptr(), offsets.data_ptr())
    return BagRequests(layout, own, core, FlatBags(ids, offsets, shapes), len(ids))


def pool_bags(ranks: Ranks, requests: BagRequests, frozen: Sequence[int], training: bool) -> Answer:
    """Have owners pool bags. Called by all ranks.

    Args:
        frozen: positions of tables that take no new rows.
        training: True if new ids get a row.
    """
    layout, core = requests.layout, requests.core
    owned: OwnedRows | None = None
    ranks.served += requests.count

    def pool(messages: list[Tensor]) -> None:
        nonlocal owned
        places = core.vector_places(addresses(messages))
        owned = resolve_owned(layout, requests.bags_here, frozen, training, places)
        if owned is not None and not requests.bags_here.read_in_backward:
            owned.resolved.bags = ()  # the ids go with the requests

    messages = send_rows(ranks, "vectors", layout, core.vectors, core.vector_sizes(), pool)
    return Answer(layout, requests.own, core, owned, messages)


class BagsBatch(OnHost):
    """`hotbed.table.resolved.Resolved`: the owners have pooled it.

    Attributes:
        lookup: which the ranks keep for its gradients; only where they are wanted.
    """

    has_own_rows = True
    lookup: KeptBags

    def __init__(self, call: Call, answer: Answer, wants_gradient: bool) -> None:
        self.live, self.table_of, self.bags = call.live, call.table_of, call.bags
        self.wants_gradient = wants_gradient
        self._answer: Answer | None = answer

    def copy_messages(self) -> None:
        """Have the vectors outlast the messages in which they came."""
        assert self._answer is not None
        copies = [message.clone() for message in self._answer.messages]
        self._answer = dataclasses.replace(self._answer, messages=copies)

    def pool(self, columns: Sequence[Columns]) -> None:
        self.write(places_in(columns, self))

    def write(self, places: list[tuple[int, int]]) -> None:
        """Write the vectors of each feature to an address, with a stride, once."""
        answer, self._answer = self._answer, None
        assert answer is not None
        answer.core.read_vectors(answer.own, addresses(answer.messages), places)

    def keep_inputs(self) -> None:
        """Nothing reads them again."""

    def backward(self, grads: Sequence[Tensor | None]) -> BagsPendingGradient:
        return BagsPendingGradient(self, grads)

    def weight_gradients(self, left: Any, outputs: object, wanted: object) -> NoReturn:
        raise AssertionError("bags with weights are not pooled by owners")


class BagsPendingGradient(PendingOnRanks):
    """`hotbed.table.backward.PendingGradient` of vectors that owners have pooled."""

    def __init__(self, batch: BagsBatch, grads: Sequence[Tensor | None]) -> None:
        self._batch = batch
        self._grads = {
            f: as_vectors(grad, batch.live[batch.table_of[f]])
            for f, grad in enumerate(grads)
            if grad is not None and grad.numel()
        }

    def shares(self, tables: Sequence[int]) -> list[BagGradients]:
        own: dict[int, dict[int, Tensor]] = {t: {} for t in tables}
        for f, grad in self._grads.items():
            if (of_table := own.get(self._batch.table_of[f])) is not None:
                of_table[f] = grad.clone()  # others may write to it once backward is over
        return [BagGradients(self._batch, t, of_table) for t, of_table in own.items()]

    def slots(self, table: int) -> Tensor:
        return self.shares([table])[0].in_rows().slots


class BagGradients(NamedTuple):
    """`hotbed.table.gradients.GradientShare` by bags of a lookup, which become rows when somebody looks."""

    batch: BagsBatch
    table: int
    """Its position in the lookup."""
    of_features: Mapping[int, Tensor]
    """(bags, dim) of the compute dtype, by features of the lookup; others have none."""

    @property
    def source(self) -> object:
        return self.batch

    def coo(self, handle: Tensor) -> TableGradient:
        return self.in_rows().coo(handle)

    def in_rows(self) -> GradientRows:
        """The same, summed by id."""
        lookup = self.batch.lookup
        dim = self.batch.live[self.table].spec.dim
        dtype = self.batch.live[self.table].compute_dtype
        ids, values = [], []
        for f in lookup.features_of(self.table):
            some, of_bags = lookup.positions(f)
            grad = self.of_features.get(f)
            ids.append(some)
            if grad is None:
                values.append(torch.zeros((len(some), dim), dtype=dtype, device="cpu"))
            else:
                inverses = torch.tensor(lookup.own.inverses(f), dtype=dtype, device="cpu")
                values.append((grad * inverses[:, None])[of_bags])
        every = torch.cat(ids)
        distinct, inverse = torch.empty_like(every), torch.empty_like(every)
        addresses = every.data_ptr(), len(every), distinct.data_ptr(), inverse.data_ptr()
        count = _core.group_ids(*addresses)
        rows = torch.zeros((count, dim), dtype=dtype, device="cpu")
        rows.index_add_(0, inverse, torch.cat(values))
        first = torch.full((count,), len(every), dtype=torch.int64, device="cpu")
        first.scatter_reduce_(0, inverse, torch.arange(len(every), device="cpu"), "amin")
        slots = first + lookup.first_slots[self.table]
        return GradientRows(slots, rows, True, False, self.batch)


class KeptBags(KeptLookup):
    """A lookup of bags, whose gradients are those of vectors. Ids of a table are numbered as they come, those
    of one feature after the other.

    Attributes:
        has_ids: True if the ids of its bags are on this rank.
    """

    kind_given = BagGradients
    has_ids = True

    def __init__(self, answer: Answer, slots: list[int]) -> None:
        self.layout, self.own, self.owned = answer.layout, answer.own, answer.owned
        self._core, self.first_slots = answer.core, slots
        self._of_features = self.own.counts
        self.counts = [0] * len(self.layout.position)
        for t, count in zip(self.layout.tables, self._of_features, strict=True):
            self.counts[t] += count

    def features_of(self, t: int) -> list[int]:
        """Return the features of a table."""
        return [f for f, of in enumerate(self.layout.tables) if of == t]

    def positions(self, f: int) -> tuple[Tensor, Tensor]:
        """(n,) int64 ids of a feature, and the bag of each."""
        ids, of_bags = (
            torch.empty(self._of_features[f], dtype=torch.int64, device="cpu") for _ in range(2)
        )
        self.own.write_positions(f, ids.data_ptr(), of_bags.data_ptr())
        return ids, of_bags

    def ids_of(self, t: int) -> Tensor:
        return torch.cat([self.positions(f)[0] for f in self.features_of(t)])

    def give(
        self,
        ranks: Messenger,
        given: Sequence[object],
        chosen: list[bool],
        seeds: Sequence[int],
    ) -> list[tuple[LiveTable, GradientRows]]:
        layout, core = self.layout, self._core
        of_tables = cast(Sequence[BagGradients | None], given)
        of_features = [chosen[t] for t in layout.tables]
        places = [(0, 0)] * len(of_features)
        for f, t in enumerate(layout.tables):
            share = of_tables[t]
            if share is not None and f in share.of_features:
                grad = share.of_features[f]
                places[f] = grad.data_ptr(), grad.stride(0)

        def write(messages: list[Tensor]) -> None:
            core.write_given(self.own, of_features, places, addresses(messages))

        chosen_seeds = of_features, [seeds[t] for t in layout.tables]
        in_core = core.given_sizes(of_features)
        received = send_gradients(ranks, layout, core.vectors, chosen_seeds, in_core, write)
        mine = [at for at, t in enumerate(layout.own_tables) if chosen[t]]
        if not mine or self.owned is None:
            return []
        here = core.given_places(of_features, addresses(received))
        return self.owned.sums(here, received, mine)


def keep_bags(ranks: Ranks, batch: object | None, answer: Answer) -> KeptBags:
    """Have the ranks keep a lookup for the gradients of a batch. `batch`: None where this rank has none."""
    made = KeptBags(answer, first_slots(answer.layout, ranks.waiting.lookups))
    ranks.waiting.add(batch, made)
    return made
