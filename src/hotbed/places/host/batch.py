"""A batch whose rows lie in the core's memory: pooled, and its gradients summed, by the core."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, overload

import torch
from torch import Tensor

from hotbed import _core, trace
from hotbed.errors import StorageError
from hotbed.inputs.bags import Bags, core_input, input_fault
from hotbed.places.core_backed import CoreLookups
from hotbed.table.backward import Update
from hotbed.table.gradients import GradientRows
from hotbed.table.lookups import Call, InputBatch, StoredTable
from hotbed.table.resolved import Columns, PooledTable, Resolved
from hotbed.tables import CORE_DTYPES

__all__ = [
    "IN_MEMORY",
    "FlatBags",
    "FlatIds",
    "HostBatch",
    "HostPendingGradient",
    "OnHost",
    "as_vectors",
    "check",
    "core_batch",
    "places_in",
]

_Addresses = list[tuple[int, int]]
"""Of (n, dim) vectors of each feature: address, and elements from one to the next. 0: there are none."""


class FlatInputs(Sequence[Bags]):
    """Inputs of many features, which the core's batch takes at once.

    Attributes:
        read_in_backward: whether the core's batch reads them once they are pooled, as weights are.
    """

    read_in_backward = True

    @overload
    def __getitem__(self, at: int) -> Bags: ...
    @overload
    def __getitem__(self, at: slice) -> list[Bags]: ...
    def __getitem__(self, at: int | slice) -> Bags | list[Bags]:
        return list(self)[at]

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Bags]: ...

    @abc.abstractmethod
    def core_batch(self, tables: list[_core.Table], table_of: Sequence[int]) -> _core.Batch:
        """Return the core's batch over these tables."""


class FlatIds(FlatInputs):
    """One vector an id.

    Attributes:
        ids: (N,) contiguous int64, those of one feature after the other.
        counts: ids of each feature.
    """

    def __init__(self, ids: Tensor, counts: list[int]) -> None:
        self.ids, self.counts = ids, counts

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Bags]:
        for ids in self.ids.split(self.counts):  # type: ignore[no-untyped-call]
            count = ids.shape[0]
            yield Bags(ids, None, 1, count, None, count, None, False)

    def core_batch(self, tables: list[_core.Table], table_of: Sequence[int]) -> _core.Batch:
        return _core.Batch.of_ids(tables, table_of, self.ids.data_ptr(), self.counts)


class FlatBags(FlatInputs):
    """One vector a bag, its sum.

    Attributes:
        ids: (N,) contiguous int64, those of one feature after the other.
        offsets: int64, bags + 1 of each feature that has some.
        shapes: (ids, bags, whether there are offsets) of each feature; without, all bags are equally long.
    """

    read_in_backward = False

    def __init__(self, ids: Tensor, offsets: Tensor, shapes: list[tuple[int, int, bool]]) -> None:
        self.ids, self.offsets, self.shapes = ids, offsets, shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[Bags]:
        begin = edge = 0
        for count, bags, has_offsets in self.shapes:
            ids, offsets = self.ids[begin : begin + count], None
            fixed = 0 if has_offsets or not bags else count // bags
            if has_offsets:
                offsets = self.offsets[edge : edge + bags + 1]
                edge += bags + 1
            begin += count
            yield Bags(ids, offsets, fixed, bags, None, bags, None, has_offsets)

    def core_batch(self, tables: list[_core.Table], table_of: Sequence[int]) -> _core.Batch:
        at, edges = self.ids.data_ptr(), self.offsets.data_ptr()
        return _core.Batch.of_sums(tables, table_of, self.shapes, at, edges)


def core_batch(
    live: Sequence[StoredTable], table_of: Sequence[int], bags: Sequence[Bags]
) -> _core.Batch:
    """The core's batch over inputs that are read."""
    cores = [table.core for table in live]
    if isinstance(bags, FlatInputs):
        return bags.core_batch(cores, table_of)
    inputs = [core_input(t, live[t].combiner, bag) for t, bag in zip(table_of, bags, strict=True)]
    return _core.Batch.make(cores, inputs)


def check(batch: InputBatch, call: Call) -> None:
    """Raises IdError or InputError where ids or offsets are bad."""
    kind, feature, bag_at, value, bound = batch.check()
    if kind:
        name = call.live[call.table_of[feature]].name
        bag = call.bags[feature]
        raise input_fault(kind, name, call.names[feature], bag, bag_at, value, bound)


def places_in(columns: Sequence[Columns], resolved: Resolved) -> _Addresses:
    """Return where the vectors of each feature go."""
    places: _Addresses = [(0, 0)] * len(resolved.bags)
    for buffer, features, _ in columns:
        at, width, size = buffer.data_ptr(), buffer.shape[1], buffer.itemsize
        for f in features:
            places[f] = at, width
            at += resolved.live[resolved.table_of[f]].spec.dim * size
    return places


def as_vectors(grad: Tensor, table: PooledTable) -> Tensor:
    """Return a gradient of vectors as (n, dim) of the compute dtype, whose rows the core can read."""
    dim = table.spec.dim
    if grad.dim() != 2:
        grad = grad.reshape(-1, dim)
    if grad.dtype != table.compute_dtype:
        grad = grad.to(table.compute_dtype)
    if grad.is_neg():  # kept as the opposite, with a mark that addresses lack
        grad = grad.resolve_neg()
    return grad.contiguous() if grad.stride(1) != 1 and dim > 1 else grad


class OnHost:
    """Base of batches whose vectors come out in the host's memory."""

    bags: Sequence[Bags]

    @functools.cached_property
    def weights(self) -> list[Tensor | None]:
        return [bag.weights for bag in self.bags]

    def dtype_of(self, table: PooledTable) -> torch.dtype:
        return table.compute_dtype

    def empty(self, vectors: int, dim: int, dtype: torch.dtype) -> Tensor:
        made: Tensor = _core.empty([vectors, dim], CORE_DTYPES[dtype])
        return made


class HostBatch(OnHost):
    """`hotbed.table.resolved.Resolved`, by the core's batch."""

    has_own_rows = False

    def __init__(
        self,
        core: _core.Batch,
        call: Call,
        wants_gradient: bool,
        over_budget: Callable[[StorageError], StorageError] = lambda error: error,
        kept: object = None,
    ) -> None:
        """`core`: resolved, and transposed if `wants_gradient`. `over_budget`: what to raise where there
        is no room for rows that backward needs. `kept`: what the core's batch reads."""
        self.core, self.live, self.table_of, self.bags = core, call.live, call.table_of, call.bags
        self.wants_gradient = wants_gradient
        self._over_budget, self._kept = over_budget, kept

    def pool(self, columns: Sequence[Columns]) -> None:
        self.core.pool(places_in(columns, self))

    def write(self, places: _core.VectorPlaces | _Addresses) -> None:
        """Write the vectors of each feature to its place."""
        self.core.pool(places)

    def keep_inputs(self) -> None:
        self.core.keep_inputs()

    def backward(self, grads: Sequence[Tensor | None]) -> HostPendingGradient:
        held: list[Tensor] = []
        places: _Addresses = [(0, 0)] * len(grads)
        for f, grad in enumerate(grads):
            if grad is None or grad.numel() == 0:
                continue
            grad = as_vectors(grad, self.live[self.table_of[f]])
            held.append(grad)
            places[f] = grad.data_ptr(), grad.stride(0)
        return self.pending_from(places, held)

    def pending_from(
        self, places: _Addresses | _core.VectorPlaces, held: Sequence[Tensor]
    ) -> HostPendingGradient:
        """Return the pending gradient of vectors. `held`: the tensors at these addresses."""
        try:
            all_stored = bool(self.core.find_slots())
        except StorageError as error:
            raise self._over_budget(error) from None
        return HostPendingGradient(self.core, self.live, places, held, all_stored, self.claim)

    @property
    def claim(self) -> object:
        """Claim that keeps the rows of the slots where they are, as `GradientRows.claim`."""
        return self.core.claim

    def weight_gradients(
        self, left: HostPendingGradient, outputs: dict[int, Tensor], wanted: Sequence[int]
    ) -> list[Tensor]:
        assert isinstance(left.places, list)
        results: list[Tensor] = []
        pooled, addresses = [(0, 0)] * len(self.bags), [0] * len(self.bags)
        for f in wanted:
            weights = self.bags[f].weights
            assert weights is not None
            result = torch.zeros_like(weights)
            if left.places[f][0]:
                addresses[f] = result.data_ptr()
            if f in outputs:
                pooled[f] = outputs[f].data_ptr(), outputs[f].stride(0)
            results.append(result)
        self.core.weight_gradients(left.places, pooled, addresses)
        return results


class HostPendingGradient(NamedTuple):
    """`hotbed.table.backward.PendingGradient`, which the core's batch sums by row."""

    core: _core.Batch
    live: Sequence[StoredTable]
    places: _Addresses | _core.VectorPlaces
    held: Sequence[Tensor]
    """What lies at these places."""
    all_stored: bool
    """Whether every id has a row; evaluation stores none."""
    claim: object
    """Of its rows, as `GradientRows.claim`."""

    def step(self, updates: Sequence[Update]) -> None:
        assert isinstance(self.places, list)
        steps = [(t, rule, numbers) for t, _, rule, numbers in updates]
        at, element, slot = _core.step_fused(self.core, self.places, steps)
        if at >= 0:
            update = self.live[at].fused_update
            assert update is not None
            raise update.refuse(slot, element)

    def slots(self, table: int) -> Tensor:
        slots = torch.empty(self.core.unique_counts()[table], dtype=torch.int64, device="cpu")
        self.core.write_unique_slots(table, slots.data_ptr())
        return slots[slots >= 0]

    def shares(self, tables: Sequence[int], *, divisor: int = 1) -> list[GradientRows]:
        """As `PendingGradient.shares`. `divisor`: of all sums."""
        every = self.core.unique_counts()
        slots = torch.empty(sum(every[t] for t in tables), dtype=torch.int64, device="cpu")
        alike: dict[tuple[torch.dtype, int], list[int]] = {}
        for t in tables:
            table = self.live[t]
            alike.setdefault((table.compute_dtype, table.spec.dim), []).append(t)
        # One block for tables whose rows are alike: memory is taken, and given back, once.
        blocks: list[_Block] = []
        places: dict[int, tuple[_Block, int]] = {}
        values_at, slots_at = [0] * len(self.live), [0] * len(self.live)
        slot_at, begin = slots.data_ptr(), 0
        for (dtype, dim), same in alike.items():
            count = sum(every[t] for t in same)
            rows: Tensor = _core.empty([count, dim], CORE_DTYPES[dtype])
            block = slots[begin : begin + count], rows
            blocks.append(block)
            row_at, at = rows.data_ptr(), 0
            for t in same:
                places[t], slots_at[t], values_at[t] = (block, at), slot_at, row_at
                at += every[t]
                slot_at += every[t] * slots.itemsize
                row_at += every[t] * dim * dtype.itemsize
            begin += count
        all_finite = self.core.reduce(self.places, values_at, slots_at)
        for _, rows in blocks if divisor > 1 else ():
            rows.div_(divisor)
        claim, shares = self.claim, list[GradientRows]()
        for t in tables:
            in_core = slots_at[t], values_at[t], every[t]
            share = SummedRows(*places[t], in_core, all_finite[t], claim)
            shares.append(share if self.all_stored and every[t] else share.stored())
        return shares


_Block = tuple[Tensor, Tensor]
"""(n,) slots, -1 where the id has no row, and (n, dim) rows, of one table after the other."""


class SummedRows(GradientRows):
    """Some rows of a block, each slot once. Tensors are made when somebody asks for them."""

    __slots__ = ("_begin", "_block")

    def __init__(
        self,
        block: _Block,
        begin: int,
        in_core: tuple[int, int, int],
        finite: bool,
        claim: object,
    ) -> None:
        self._block, self._begin, self.in_core = block, begin, in_core
        self._tensors, self.distinct, self.finite, self.claim = None, True, finite, claim

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            at = slice(self._begin, self._begin + self.in_core[2])
            self._tensors = self._block[0][at], self._block[1][at]
        return self._tensors

    def stored(self) -> GradientRows:
        """Return those of ids that have a row, in memory of torch where there are none: torch adds to it in
        place, which memory of the core would not allow."""
        slots, rows = self.tensors
        kept = slots >= 0
        return GradientRows(slots[kept], rows[kept], True, self.finite, self.claim)


class MemoryLookups(CoreLookups):
    """Tables whose rows all lie in the core's memory."""

    is_immediate = True

    def resolve(self, call: Call) -> HostBatch:
        batch = core_batch(call.live, call.table_of, call.bags)
        check(batch, call)
        wanted = torch.is_grad_enabled() and len(call.frozen) < len(call.live)
        with trace.span("resolve"):
            batch.resolve(call.training, wanted, call.frozen)
        return HostBatch(batch, call, wanted)

    def stats(self, live: Sequence[StoredTable]) -> dict[str, float]:
        batches, rows, created = zip(*(table.core.trained for table in live), strict=True)
        used, new = sum(rows), sum(created)
        return {
            **super().stats(live),
            "rows_used": float(used),
            "rows_missed": float(new),
            "rows_created": float(new),
            "hit_rate": (used - new) / used if used else 1.0,
            "batches": float(max(batches)),
            "wait_ms": 0.0,
        }


IN_MEMORY: Final = MemoryLookups()
