"""Look-ahead across ranks: ids of later batches go to their owners, who bring their rows up."""

from __future__ import annotations

import datetime
import functools
import weakref
import zlib
from collections.abc import Sequence
from typing import cast

from torch import Tensor

from hotbed import _core
from hotbed.dist.beside import Beside
from hotbed.dist.exchanged_values import KeptLookup
from hotbed.dist.owned_ahead import OwnedAhead
from hotbed.dist.parts import Asked
from hotbed.dist.ranks import Ranks
from hotbed.dist.rounds import Rounds, RoundSession
from hotbed.dist.rows_ahead import Divides, RowsAhead, Travelled
from hotbed.dist.shards import TableOnRanks
from hotbed.dist.waiting_gradients import waiting_of
from hotbed.dist.ways import RowsTold, agree, bits, room_of
from hotbed.errors import HotbedError
from hotbed.inputs.bags import Bags
from hotbed.places.host.batch import core_batch
from hotbed.places.tiered.prepared import Offers, ReadBatch
from hotbed.places.tiered.tiers import Tiers
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call, CallAhead
from hotbed.table.prefetch import Window

__all__ = ["BatchOnRanks", "PrefetchOnRanks", "digest_of"]


class PrefetchOnRanks:
    """`hotbed.table.prefetch.Prefetcher` of the tables of one model that ranks share.

    Attributes:
        ranks: that share them.
        rounds: in which ids travel.
        offers: batches whose ids have travelled, and that no forward has used.
        beside: on which rows of the next batch travel; None: they come with its lookup.
    """

    def __init__(self, ranks: Ranks, *, rows_ahead: bool = False) -> None:
        """Called by all ranks. `rows_ahead`: whether rows of the next batch are sent ahead."""
        self.ranks = ranks
        wait = datetime.timedelta(seconds=ranks.timeout)
        self.beside = Beside(ranks, "rows ahead", wait) if rows_ahead else None
        self._travelled: dict[int, Travelled] = {}  # the last one of each digest
        self.offers: Offers[BatchOnRanks] = Offers()
        self.rounds = Rounds(ranks)
        self._offered = 0  # round of the last batch that was
        self._window: weakref.ref[Window] | None = None

    @property
    def is_idle(self) -> bool:
        return self.rounds.is_idle

    @property
    def shards(self) -> list[LiveTable]:
        """Return those of this rank."""
        tables = [table for number in self.ranks.tables if (table := number()) is not None]
        return [own for table in tables for own in table.place.own.values()]

    @functools.cached_property
    def tiers(self) -> list[Tiers]:
        """Return the tiers in which shards of this rank lie, once there are some."""
        found = dict.fromkeys(own.place.lookups.prefetcher for own in self.shards)
        return [one for one in found if isinstance(one, Tiers)]

    def pop(self, call: Call, given: _core.Batch) -> BatchOnRanks | None:
        """Return what was prepared for a call, or None."""
        if not call.training or not self.offers.batches:
            return None
        found = self.offers.pop(call.live, given, call.frozen)
        return found if found is not None and found.has_weights_of(call) else None

    def allocate_all(self) -> bool:
        try:
            return all([tiers.allocate_all() for tiers in self.tiers])
        except HotbedError:  # an error of the next forward, of which the other ranks hear
            return False

    def ids_ahead(self) -> int | None:
        own = self.tiers
        if not own and self.beside is not None:
            return 1  # of one batch
        return sum(tiers.ids_ahead() for tiers in own) if own else None

    def divide(self, digest: int, sent: Sequence[Divides]) -> Travelled:
        """Find which rows of a batch can be sent while the one before is trained on. Called by all ranks, on
        the thread of the rounds.

        Args:
            digest: of its tables.
            sent: its ids, of what comes as rows.
        """
        made = Travelled(self.rounds.count, {one.layout: one.at_owners for one in sent})
        if self.beside is None:
            return made
        before, self._travelled[digest] = self._travelled.get(digest), made
        if before is not None:
            for one in sent:
                if (earlier := before.requests.get(one.layout)) is not None:
                    made.parts.append(one.divide(self.rounds, earlier))
            before.next = made
        return made

    def send_ahead(self, following: Travelled, lookups: Sequence[KeptLookup]) -> None:
        """Send rows of a batch while the one before is trained on. Called by all ranks.

        Args:
            lookups: of the batch before.
        """
        assert self.beside is not None
        following.rows_ahead = RowsAhead(self.ranks, self.beside, following, lookups)

    def open_window(self, window: Window) -> RoundSession:
        earlier = None if self._window is None else self._window()
        if earlier is not None and not earlier.closed:
            earlier.close()
        self._window = weakref.ref(window)
        for tiers in self.tiers:
            tiers.open_window(window)
        return self.rounds.open_session(window)

    def release_spent(self) -> None:
        for tiers in self.tiers:
            tiers.release_spent()

    def offer(self, batch: BatchOnRanks) -> None:
        """Let a forward find a batch."""
        self.offers.append(batch)
        self._offered = max(self._offered, batch.round)

    def drop_offers(self) -> None:
        self.offers.clear()
        self.rounds.spent = self._offered
        for tiers in self.tiers:
            tiers.drop_offers()

    def count(self, waited: float, queue: int) -> None:
        for tiers in self.tiers:
            tiers.count(waited, queue)


def digest_of(call: CallAhead, kind: str = "ids travel") -> int:
    """Return what tells ranks whether they read batches of one `kind` for the same tables."""
    numbers = [table.place.number for table in cast(Sequence[TableOnRanks], call.live)]
    return zlib.crc32(repr((kind, numbers, list(call.table_of))).encode())


class BatchOnRanks(ReadBatch[_core.Batch]):
    """A batch of this rank, whose ids travel in a round.

    Attributes:
        asked: what they ask of the owners.
        digest: of the tables that it is about.
        travelled: its ids, once they have travelled.
    """

    asked: Asked

    def __init__(self, prefetcher: PrefetchOnRanks, call: CallAhead, bags: Sequence[Bags]) -> None:
        """`bags`: what `call` reads."""
        super().__init__(call, bags)
        self._prefetcher = prefetcher
        self._owned: list[OwnedAhead] = []
        self._places = [one.place for one in cast(Sequence[TableOnRanks], call.live)]
        self.digest = digest_of(call)
        self.travelled = Travelled(0, {})
        self._following: Travelled | None = None

    def _keeps_ids(self, table: int) -> bool:
        return True

    def _batch_of(self, bags: Sequence[Bags]) -> _core.Batch:
        return core_batch(self.live, self.table_of, bags)

    def has_weights_of(self, call: Call) -> bool:
        """Return True if the same features have weights: what owners were asked for depends on it."""
        pairs = zip(self.bags, call.bags, strict=True)
        return all((one.weights is None) is (other.weights is None) for one, other in pairs)

    def travel(self, rounds: Rounds) -> None:
        """Bring the ids to their owners. Called by all ranks, on the thread of the rounds."""
        call = Call(self.live, self.table_of, self._names, self.bags, self.frozen, True)
        modes = bits(self.frozen, len(self.live))

        def tell(numbers: list[int]) -> tuple[Tensor, list[bool]]:
            return rounds.gather(numbers), [rank in ranks.hosts for rank in range(ranks.size)]

        ranks = self._prefetcher.ranks
        if ranks.hosts:
            tables = [place.number for place in self._places]
            rounds.describe(self.digest, [room_of(call, self._places), *tables])
        self.asked, numbers = agree(ranks, call, self.batch, self._places, modes, tell)
        self.asked.send(rounds, numbers)
        self.travelled = self._prefetcher.divide(self.digest, self.asked.by_rows())

    @property
    def round(self) -> int:
        """Return the round in which its ids have travelled; 0: in none."""
        return self.travelled.round

    def numbers(self) -> list[int]:
        """Return what is told before the modes of its lookup, `hotbed.dist.ways.AHEAD` numbers."""
        following = self.travelled.next
        if following is not None and not (following.has_steady_rows and self._is_free()):
            following = None
        self._following = following
        then = 0 if following is None else following.round
        return [self.round, int(self.travelled.has_good_rows), then]

    def _is_free(self) -> bool:
        """Return True if no gradient waits at the owners, which the next step adds."""
        tables = cast(Sequence[TableOnRanks], self.live)
        return not any(waiting_of(one).at_owners for one in tables)

    def hear(self, told: RowsTold) -> None:
        """Take what all ranks have told, where all have told the round of this batch."""
        self.travelled.take_rows(told.are_good)
        if not told.next_round:
            self._following = None

    def send_rows_of_next(self, lookups: Sequence[KeptLookup]) -> None:
        """Send the next batch's rows ahead, where all ranks can. Called by all ranks.

        Args:
            lookups: of this batch.
        """
        following, self._following = self._following, None
        if following is not None:
            self._prefetcher.send_ahead(following, lookups)

    def announce(self) -> None:
        for inputs in self.asked.owned():
            made = OwnedAhead.of(inputs)
            if made is not None:
                self._owned.append(made)

    def admit(self) -> bool:
        return all([owned.admit() for owned in self._owned])

    def offer(self, waited: bool) -> None:
        self._prefetcher.offer(self)
        for owned in self._owned:
            owned.offer(waited)
