"""Requests of ranks to the shards of this rank in a later batch: announced to their tiers, and brought up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hotbed import _core
from hotbed.dist.exchange import owned_call
from hotbed.dist.exchanged_values import OwnedInputs
from hotbed.inputs.bags import Bags
from hotbed.places.host.batch import core_batch
from hotbed.places.tiered.tiers import Tiers
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call, InputBatch, StoredTable

__all__ = ["OwnedAhead", "tiers_of"]


def tiers_of(call: Call) -> Tiers | None:
    """Return the tiers in which the shards of an owner's lookup lie; None: they lie in memory."""
    tiers = cast(LiveTable, call.live[0]).place.lookups.prefetcher
    return tiers if isinstance(tiers, Tiers) else None


class OwnedAhead:
    """A later lookup of shards in tiers: `hotbed.places.tiered.batch.PreparedBatch`."""

    waited_for = False

    def __init__(self, call: Call, tiers: Tiers, batch: _core.Batch) -> None:
        """Announce it. `batch`: of the call, grouped."""
        self._live, self._frozen, self._tiers = call.live, list(call.frozen), tiers
        self.bags: Sequence[Bags] = call.bags
        self.batch = batch
        batch.announce()

    @classmethod
    def of(cls, inputs: OwnedInputs) -> OwnedAhead | None:
        """Group and announce it; None: there is none, or its rows need no bringing up."""
        call = owned_call(*inputs, training=True)
        tiers = None if call is None else tiers_of(call)
        if call is None or tiers is None:
            return None
        batch = core_batch(call.live, call.table_of, call.bags)
        batch.group(list(call.frozen))
        return cls(call, tiers, batch)

    def serves(self, live: Sequence[StoredTable], batch: InputBatch, frozen: Sequence[int]) -> bool:
        same = self._frozen == frozen and len(self._live) == len(live)
        if not same or any(a is not b for a, b in zip(self._live, live, strict=True)):
            return False
        return self.batch.first_difference(cast(_core.Batch, batch)) < 0

    def changed(self) -> None:
        """Nobody else has these ids."""

    def admit(self) -> bool:
        """Bring its rows up; False: they do not fit yet."""
        return self.batch.admit()

    def offer(self, waited: bool) -> None:
        """Let the lookup find it. `waited`: True if training had to wait for its rows."""
        self.waited_for = waited
        self._tiers.prepared.append(self)
