"""Look-ahead for model-parallel input: owners have the ids, and bring their rows up."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed import _core
from hotbed.dist.exchange import owned_call
from hotbed.dist.owned_ahead import OwnedAhead, tiers_of
from hotbed.dist.prefetch import digest_of
from hotbed.dist.ranks import Ranks
from hotbed.dist.rounds import Rounds
from hotbed.dist.whole_batches import WholeBags, all_whole, inputs_here, kept_here
from hotbed.errors import InputError
from hotbed.inputs.bags import Bags
from hotbed.places.host.batch import core_batch
from hotbed.places.tiered.prepared import ReadBatch
from hotbed.table.lookups import Call, CallAhead

__all__ = ["WholeAhead"]


class WholeInputs:
    """`hotbed.places.tiered.prepared.ReadInputs`: whole batches of features. This rank has the ids of the
    tables that it keeps.

    Attributes:
        call: what ranks ask of the shards of this rank; None: it keeps none.
        core: batch of that call.
    """

    core: _core.Batch

    def __init__(self, bags: Sequence[WholeBags], kept: Sequence[int], call: Call | None) -> None:
        """`kept`: features of which this rank has the ids."""
        self._samples = [bag.samples for bag in bags]
        self._kept, self.call = kept, call
        if call is not None:
            self.core = core_batch(call.live, call.table_of, call.bags)

    def check(self) -> tuple[int, int, int, int, int]:
        return (0, 0, 0, 0, 0) if self.call is None else self.core.check()

    def group(self, frozen: Sequence[int], /) -> None:
        if self.call is not None:
            self.core.group(list(self.call.frozen))

    def first_difference(self, now: WholeInputs) -> int:
        for f, (one, other) in enumerate(zip(self._samples, now._samples, strict=True)):
            if one != other:
                return f
        if self.call is None:
            return -1
        at = self.core.first_difference(now.core)
        return at if at < 0 else self._kept[at // len(self._samples[0])]


class WholeAhead(ReadBatch[WholeInputs]):
    """A batch of `hotbed.dist.owned`. Its round brings no ids: it says that all ranks have read the batch.

    Attributes:
        digest: of the tables that it is about.
    """

    def __init__(self, ranks: Ranks, call: CallAhead, bags: Sequence[Bags]) -> None:
        """`bags`: what `call` reads.

        Raises:
            InputError: not all of them are of `owned`, or there are memory hosts.
        """
        if ranks.hosts:  # which take part in rounds of ids
            raise InputError("A batch of hotbed.dist.owned is not for a model with memory hosts.")
        self._ranks = ranks
        super().__init__(call, bags)
        self.digest = digest_of(call, "owners have ids")
        self._owned: OwnedAhead | None = None

    def _keeps_ids(self, table: int) -> bool:
        return True

    def _batch_of(self, bags: Sequence[Bags]) -> WholeInputs:
        wholes = all_whole(bags)
        inputs = inputs_here(self._ranks, self.live, self.table_of, wholes, self.frozen)
        kept = kept_here(self.live, self.table_of)
        return WholeInputs(wholes, kept, owned_call(*inputs, training=True))

    def travel(self, rounds: Rounds) -> None:
        """Owners have the ids already."""

    def announce(self) -> None:
        call = self.batch.call
        tiers = None if call is None else tiers_of(call)
        if call is not None and tiers is not None:
            self._owned = OwnedAhead(call, tiers, self.batch.core)

    def admit(self) -> bool:
        return self._owned is None or self._owned.admit()

    def offer(self, waited: bool) -> None:
        if self._owned is not None:
            self._owned.offer(waited)
