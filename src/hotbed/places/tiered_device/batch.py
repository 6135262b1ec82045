"""Batches of tables in tiers, on their way to the device that is the uppermost of these."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed import _core, trace
from hotbed.errors import StorageError
from hotbed.inputs.bags import Bags
from hotbed.ops.gpu.pool import FeatureSlots
from hotbed.ops.gpu.recording import use
from hotbed.ops.gpu.transpose import TransposedIndex, with_chunks
from hotbed.places.device.batch import DeviceResolved
from hotbed.places.device.gradients import GradientSource
from hotbed.places.device.inputs import bring_weights
from hotbed.places.host.batch import core_batch
from hotbed.places.tiered.tiers import Tiers
from hotbed.places.tiered_device.spaces import Side, SpaceOnDevice, host_memory
from hotbed.table.lookups import Call, StoredTable

__all__ = ["TieredBatch", "arrived"]


def arrived(batch: TieredBatch, call: Call, device: torch.device) -> DeviceResolved:
    """A batch of tables in tiers, which has its slots, when it has come to the device."""
    use(call.live)
    weights = [bring_weights(bag.weights, device) for bag in call.bags]
    with trace.span("bring the batch"):
        features = batch.features(weights)
    return DeviceResolved(call, device, weights, features, batch)


class TieredBatch:
    """A batch of the core's, which is also sent to the device once its rows have slots.

    What look-ahead does with a batch of the core it does with this one: `check`, `group`, `announce`,
    `admit` on its thread; `resolve` and what follows are for the training thread.
    """

    def __init__(
        self,
        live: Sequence[StoredTable],
        table_of: Sequence[int],
        bags: Sequence[Bags],
        tiers: Tiers,
        side: Side,
    ) -> None:
        self._live, self._table_of = list(live), list(table_of)
        self._given = list(bags)
        self._known = [_memory_on_device(bag) for bag in bags]
        self._tiers, self._side = tiers, side
        self._rounds = any(table.spec.dtype.itemsize == 2 for table in live)
        self._frozen: frozenset[int] = frozenset()
        self._written: tuple[tuple[_core.Table, Tensor], ...] | None = None
        self._sent: _Sent | None = None
        self._index: TransposedIndex | None = None

    # -- as the core's batch ---------------------------------------------------------------------

    @functools.cached_property
    def _bags(self) -> list[Bags]:
        return [_on_host(bag) for bag in self._given]

    @functools.cached_property
    def _core(self) -> _core.Batch:
        return core_batch(self._live, self._table_of, self._bags)

    def check(self) -> tuple[int, int, int, int, int]:
        return self._core.check()

    def first_difference(self, now: TieredBatch) -> int:
        # What lies on the device is known by its memory: nobody waits for it.
        now._bags = [
            mine._replace(weights=given.weights)
            if known is not None and known == now_known
            else _on_host(given)
            for mine, given, known, now_known in zip(
                self._bags, now._given, self._known, now._known, strict=True
            )
        ]
        return int(self._core.first_difference(now._core))

    def use_weights_of(self, now: TieredBatch) -> None:
        """Do nothing: weights are read where the forward has them."""

    def group(self, frozen: Sequence[int]) -> None:
        self._frozen = frozenset(frozen)
        self._core.group(frozen)

    def announce(self) -> None:
        self._core.announce()

    def admit(self) -> bool:
        if not self._core.admit():
            return False
        if not self._frozen:  # frozen tables are read by the forward
            self._sent = _Sent(self._core, self._bags, self._side, True)
        return True

    def resolve(self, insert: bool, transpose: bool, frozen: Sequence[int]) -> None:
        self._side.train_here()
        self._core.resolve(insert, transpose, frozen)
        if self._sent is None:
            self._sent = _Sent(self._core, self._bags, self._side, insert and transpose)

    # -- for the lookup --------------------------------------------------------------------------

    @property
    def gradient_source(self) -> GradientSource:
        return GradientSource(claim=self._core.claim, written=self._written)

    def features(self, weights: Sequence[Tensor | None]) -> list[FeatureSlots]:
        """The batch over slots, when it has arrived on the device."""
        sent, bags = self._sent, self._bags
        assert sent is not None
        sent.arrive(self._side)
        self._take_index(sent)
        scratch = [self._scratch(t) for t in range(len(self._live))]
        features, at = [], 0
        for f, (bag, t) in enumerate(zip(bags, self._table_of, strict=True)):
            unpooled = self._live[t].spec.combiner == "none"
            weight = weights[f]
            feature = FeatureSlots(
                table=t,
                slots=sent.slots[at : at + len(bag.ids)],
                combiner=self._live[t].spec.combiner or "none",
                offsets=None if unpooled else sent.offsets[f],
                fixed=1 if unpooled else max(bag.fixed, 1),
                weights=None if weight is None else weight.detach(),
                scratch=scratch[t],
            )
            features.append(feature)
            at += len(bag.ids)
        return features

    def index(self) -> TransposedIndex:
        """The transposed index, for backward. A batch that was only read finds slots for it first.

        Raises:
            StorageError: it does not fit beside what is pinned.
        """
        if self._index is None:
            self._side.compute_here()
            try:
                self._core.find_slots()
            except StorageError as error:
                raise self._tiers.over_budget(error) from None
            sent = _Sent(self._core, self._bags, self._side, True)
            sent.arrive(self._side)
            self._take_index(sent)
            # Others of the claim are of rows that exist nowhere, and shall not for a reader.
            self._written = tuple(
                (table.core, slots)
                for table, slots in zip(self._live, sent.slots_by_table(), strict=True)
            )
        assert self._index is not None
        return self._index

    def _take_index(self, sent: _Sent) -> None:
        if sent.index is None or self._index is not None:
            return
        slots, starts, order, table_starts, ids = sent.index
        # Tables that were not brought up have no positions in it.
        counts = [0] * len(self._live)
        for bag, t in zip(self._bags, self._table_of, strict=True):
            counts[t] += len(bag.ids)
        self._index = with_chunks(slots, starts, order, table_starts, tuple(counts))
        if not self._rounds:
            return
        for t, table in enumerate(self._live):
            space = _core.planes_of(table.core)
            assert isinstance(space, SpaceOnDevice)
            plane = space.ids
            first, last = sent.table_starts[t], sent.table_starts[t + 1]
            if plane is not None and last > first:
                plane.index_copy_(0, slots[first:last], ids[first:last])

    def _scratch(self, table: int) -> Tensor | None:
        address, nbytes = _core.scratch_of(self._core, table)
        if not nbytes:
            return None
        spec = self._live[table].spec
        packed = self._side.pinned(nbytes, torch.uint8)
        packed.copy_(host_memory(address, nbytes))
        rows = packed.to(self._side.device, non_blocking=True)
        scratch: Tensor = rows.view(spec.dtype).reshape(-1, spec.dim)
        return scratch


class _Sent:
    """Slots, offsets and index of a batch, on their way to the device as one block."""

    def __init__(
        self, core: _core.Batch, bags: Sequence[Bags], side: Side, with_index: bool
    ) -> None:
        tables = len(core.unique_counts())
        positions = sum(len(bag.ids) for bag in bags)
        offsets = [bag.offsets for bag in bags]
        # Bags of no ids at all have offsets too: all of them 0.
        edged = [
            o is not None or not (bag.fixed or not bag.bags)
            for bag, o in zip(bags, offsets, strict=True)
        ]
        behind = positions + sum(bag.bags + 1 for bag, e in zip(bags, edged, strict=True) if e)
        room = 4 * positions + tables + 2 if with_index else 0
        host = side.pinned(behind + room)
        _core.write_slots(core, host.data_ptr())
        at = positions
        edges: list[tuple[int, int] | None] = []
        for bag, o, edge in zip(bags, offsets, edged, strict=True):
            if not edge:
                edges.append(None)
                continue
            end = at + bag.bags + 1
            host[at:end] = 0 if o is None else o
            edges.append((at, end))
            at = end
        sizes: list[int] = []
        if with_index:
            used, taken = _core.write_index(core, host.data_ptr() + 8 * behind)
            sizes = [used, used + 1, taken, tables + 1, used]
            first = behind + used + used + 1 + taken
            self.table_starts: list[int] = host.numpy()[first : first + tables + 1].tolist()
        with side.entered():
            there = host[: behind + sum(sizes)].to(side.device, non_blocking=True)
        self._host, self._there, self._index_begin = host, there, behind
        self._arrived = side.mark()
        self.slots = there[:positions]
        self.offsets = [None if edge is None else there[slice(*edge)] for edge in edges]
        self.index = torch.split(there[behind:], sizes) if with_index else None

    def slots_by_table(self) -> list[Tensor]:
        """The slots of the index, on the host."""
        edges = [self._index_begin + edge for edge in self.table_starts]
        return [self._host[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]

    def arrive(self, side: Side) -> None:
        """The stream that computes waits for it, and for the rows that were brought before."""
        side.use([self._there], self._arrived)


def _memory_on_device(bag: Bags) -> object:
    """Return a key of the ids and offsets of a feature, valid while they are alive; None where they lie on
    the host, or there is no such key."""
    parts = [part for part in (bag.ids, bag.offsets) if part is not None]
    if any(part.device.type == "cpu" or part.is_inference() for part in parts):
        return None
    return [(part.data_ptr(), part._version, part.shape, part.dtype) for part in parts], bag.fixed


def _on_host(bag: Bags) -> Bags:
    """Ids and offsets where the core can read them; waits for the device if they lie there."""
    ids, offsets = bag.ids, bag.offsets
    if ids.device.type != "cpu":
        ids = ids.cpu()
    if offsets is not None and offsets.device.type != "cpu":
        offsets = offsets.cpu()
    return bag._replace(ids=ids, offsets=offsets)
