"""Rows that several ranks keep: each has its share, and asks the others for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed import _core, init
from hotbed.dist.part import ShardedPart
from hotbed.dist.ranks import Ranks
from hotbed.dist.shares import Share
from hotbed.dist.trip import Trip
from hotbed.errors import HotbedError, OptimizerError, TableError
from hotbed.resolve.lookup import looked_up
from hotbed.resolve.on_host import HostBatch, HostLeft, check, core_batch
from hotbed.table.gradients import LeftRows
from hotbed.table.place import Call, Home, Place
from hotbed.table.records import Records
from hotbed.tables import CORE_DTYPES, Table

__all__ = ["Sharded"]


class Sharded(Place):
    """A slot is the number of a distinct id in the batches that wait for their step.

    Attributes:
        ranks: the processes that share the table.
        shares: all of them.
        own: tables of their own with the rows that this rank keeps.
    """

    rows_move = True

    def __init__(
        self,
        core: _core.Table,
        spec: Table,
        ranks: Ranks,
        shares: Sequence[Share],
        own: Mapping[Share, Any],
    ) -> None:
        super().__init__(core, spec)
        self.ranks, self.shares, self.own = ranks, list(shares), dict(own)
        self.group = self.stepped = ranks
        self.slots_taken = 0
        self._handles = [live.parameter for live in self.own.values()]  # they keep gradients

    @property
    def where(self) -> str:
        return f"shards of {self.ranks.size} ranks"

    def resolve(self, call: Call) -> ShardedBatch:
        return ShardedBatch.of(self.ranks, call)

    def settle(self) -> None:
        for live in self.own.values():
            live.settle()

    # -- rows ------------------------------------------------------------------------------------

    def read(self, ids: Tensor) -> Tensor:
        """Called by all ranks, each with ids of its own."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        trip = Trip(self.ranks, [self], [distinct])
        with torch.no_grad():
            (rows,) = trip.fetch("a lookup of rows", looked_up, [], [], False)
        return rows[inverse]

    def records(self, *, states: bool = True, current: bool = True) -> Iterator[Records]:
        """Those of this rank, with whole rows only."""
        for share, live in self.own.items():
            if share.part.dim != self.spec.dim:
                raise TableError(
                    f"Table {self.core.name!r} is kept by columns; no rank has whole rows of it."
                )
            origin = share.part.origin
            for rows in live.place.records(states=states, current=current):
                yield rows._replace(ids=origin.ids_in_table(rows.ids))

    def write(self, records: Records) -> None:
        """Of the rows those that this rank keeps."""
        ids, weights, states, steps = records
        for share, live in self.own.items():
            own, here = share.part.origin.ids_in_part(ids)
            at, columns = slice(None) if here is None else here, share.part.columns
            cut = [
                s[at] if s.shape[1] == 1 else s[at][:, columns].contiguous() for s in states or ()
            ]
            live.write(
                Records(
                    own,
                    None if weights is None else weights[at][:, columns].contiguous(),
                    None if states is None else cut,
                    None if steps is None else steps[at],
                )
            )

    def forget(self) -> None:
        for live in self.own.values():
            live.forget_rows()

    def memory(self) -> dict[str, int]:
        """Of this rank."""
        found: dict[str, int] = {}
        for live in self.own.values():
            for what, size in live.memory().items():
                found[what] = found.get(what, 0) + size
        return found

    # -- states ----------------------------------------------------------------------------------

    def make_states(self, rule: Any) -> None:
        for live in self.own.values():
            made = None
            if rule is not None:
                initial = rule.initial_accumulator_value
                made = _core.TableRule.make(live.core, rule.options, initial, rule.exact)
            live.rule = made
            live.settle()

    def reset_states(self, rule: Any, firsts: Sequence[float]) -> None:
        for live in self.own.values():
            live.place.reset_states(live.rule, firsts)

    def make_part(self, optimizer: Any, tables: Sequence[Any]) -> ShardedPart:
        return ShardedPart(optimizer, self.ranks)

    # -- moving ----------------------------------------------------------------------------------

    def for_copy(self, memo: dict[int, Any] | None) -> tuple[Home, Callable[[Any], None] | None]:
        raise TableError(f"Table {self.core.name!r} is shared by ranks; it cannot be copied.")

    def refuse_device(self, device: torch.device, by_kernels: Any) -> None:
        raise TableError(f"Table {self.core.name!r} is shared by ranks, on their hosts so far.")

    def move_to_device(self, live: Any, device: torch.device, by_kernels: Any) -> None:
        self.refuse_device(device, by_kernels)


class _Scratch:
    """The rows of one batch, as the core's batch takes a table."""

    def __init__(self, live: Any, ids: Tensor, rows: Tensor) -> None:
        spec = live.spec
        self.combiner = live.combiner
        padding = None
        if spec.padding_idx is not None:
            at = torch.nonzero(ids == spec.padding_idx).flatten()
            padding = int(at[0]) if len(at) else None
        zeros = init.Zeros().resolve(None, 1)
        dtype = CORE_DTYPES[spec.dtype]
        size = max(1, len(ids))
        self.core = _core.Table.make(spec.name, size, spec.dim, dtype, *zeros, 0, padding)
        slots = torch.arange(len(ids))
        _core.write(self.core, slots.data_ptr(), len(ids), rows.data_ptr())


class ShardedBatch(HostBatch):
    """Its rows, fetched from their keepers, lie beside it as long as it does."""

    trip: Trip

    @classmethod
    def of(cls, ranks: Ranks, call: Call) -> ShardedBatch:
        fault: HotbedError | None = None
        try:
            check(core_batch(call.live, call.table_of, call.bags), call)
        except HotbedError as error:
            fault = error
        if fault is not None:
            ranks.agree("a lookup", fault=fault)
        ids = [bag.ids.long() for bag in call.bags]
        asked = [
            torch.unique(torch.cat([ids[f] for f, of in enumerate(call.table_of) if of == t]))
            for t in range(len(call.live))
        ]
        trip = Trip(ranks, [live.place for live in call.live], asked)
        wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
        frozen = sum(1 << t for t in call.frozen if t < 62)
        modes = [int(call.training), int(wanted), len(call.live), frozen]
        rows = trip.fetch("a lookup", looked_up, modes, call.frozen, call.training)
        bags = [
            bag._replace(ids=torch.searchsorted(asked[t], own))
            for bag, own, t in zip(call.bags, ids, call.table_of, strict=True)
        ]
        scratch = [
            _Scratch(live, own, some)
            for live, own, some in zip(call.live, asked, rows, strict=True)
        ]
        core = core_batch(scratch, call.table_of, bags)
        core.resolve(False, wanted, call.frozen)
        made = cls(core, call._replace(bags=bags), wanted, kept=(scratch, bags))
        made.trip = trip
        if wanted:
            trip.take_slots(fresh=not ranks.waiting)
            ranks.wait_for(made, trip)
        return made

    def backward(self, grads: Sequence[Tensor | None]) -> Any:
        return ShardedLeft(super().backward(grads), self)


class ShardedLeft:
    """What one backward left: by the batch's own numbers, which its places make slots of."""

    def __init__(self, left: HostLeft, batch: ShardedBatch) -> None:
        self._left, self._batch = left, batch
        self.places = left.places

    def shares(self, tables: Sequence[int]) -> list[LeftRows]:
        first = self._batch.trip.first_slots
        return [
            LeftRows(share.slots + first[t], share.rows, True, False, self._batch)
            for t, share in zip(tables, self._left.shares(tables), strict=True)
        ]

    def step(self, updates: Any) -> None:
        raise OptimizerError("fused=True updates tables in backward, which ranks cannot agree on.")
