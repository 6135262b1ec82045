"""Look-ahead of memory hosts: they hear which ids the others will ask for, and bring the rows up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from hotbed import trace
from hotbed.ahead.threads import BRINGING_UP, started
from hotbed.dist.errors import PeerError
from hotbed.dist.owned_ahead import OwnedAhead
from hotbed.dist.prefetch import PrefetchOnRanks
from hotbed.dist.ranks import Ranks
from hotbed.dist.rounds import Told, are_alike
from hotbed.dist.rows_ahead import Travelled
from hotbed.dist.served import ServedLookup
from hotbed.dist.ways import AHEAD, RowsTold, bits
from hotbed.errors import TableError

__all__ = ["PrefetchOnHost"]


class AskedAhead:
    """Requests of the others in a round: a batch that they will look up.

    Attributes:
        sent: it, whose ids are here.
        travelled: the same, whose rows may be sent ahead.
        is_dead: True if a rank will not look it up, or does so at this moment.
        owned: the same, announced to the tiers of the shards; None: not yet.
        ids: how many of them are announced.
        is_admitted: True if its rows are brought up.
        tried: turn in which they did not fit.
    """

    def __init__(self, sent: ServedLookup, travelled: Travelled) -> None:
        self.sent, self.travelled, self.is_dead = sent, travelled, False
        self.withdraw()

    def withdraw(self) -> None:
        """Take back what is announced."""
        self.owned: list[OwnedAhead] | None = None
        self.ids, self.is_admitted, self.tried = 0, False, -1

    def announce(self) -> None:
        made = [OwnedAhead.of(inputs) for inputs in self.sent.owned()]
        self.owned = [one for one in made if one is not None]
        self.ids = sum(bag.positions for owned in self.owned for bag in owned.bags)


class _Pending:
    """Batches that the others will look up. `moved` guards it.

    Attributes:
        batches: by the round in which they were asked for, in this order.
        depth: how many of them are brought up.
        turn: counts lookups and steps, after each of which what did not fit is tried again.
        round: the last one that is over.
    """

    def __init__(self) -> None:
        self.moved = threading.Condition()
        self.batches: dict[int, AskedAhead] = {}
        self.depth = self.turn = self.round = 0


class _HostWindow:
    """`hotbed.table.prefetch.Window` over batches of other ranks. Its thread announces them, and brings rows
    up, until it is closed; a later window does so anew."""

    def __init__(self, pending: _Pending, most_ids: int) -> None:
        """`most_ids`: of batches beyond `depth`, of which no more are announced than have so many."""
        self._pending, self._most_ids = pending, most_ids
        self.loop: object = self
        self.closed = False
        self.at_work: set[str] = set()
        self.failure: BaseException | None = None
        self.busy: AskedAhead | None = None
        self._threads = started(self, pending.moved, [BRINGING_UP])

    @property
    def depth(self) -> int:
        return self._pending.depth

    def is_at(self, batch: AskedAhead) -> bool:
        """Return True if the thread is at work on a batch."""
        return self.busy is batch and bool(self.at_work)

    def task(self, work: str) -> Callable[[], None] | None:
        """As of `hotbed.ahead.threads.HasTasks`."""
        pending, self.busy = self._pending, None
        alive = [batch for batch in pending.batches.values() if not batch.is_dead]
        known = 0
        for at, batch in enumerate(alive):
            if at >= pending.depth and known >= self._most_ids:
                break
            if batch.owned is None:
                self.busy = batch
                return lambda: self._announce(batch)
            known += batch.ids
        for batch in alive[: pending.depth]:
            if not batch.is_admitted:
                if batch.tried == pending.turn:
                    return None
                self.busy, turn = batch, pending.turn
                return lambda: self._admit(batch, turn)
        return None

    def _announce(self, batch: AskedAhead) -> None:
        try:
            with trace.span("announce ids"):
                batch.announce()
        except Exception:
            batch.owned = []  # its lookup finds the same, and says so

    def _admit(self, batch: AskedAhead, turn: int) -> None:
        try:
            with trace.span("bring rows up"):
                batch.is_admitted = all([owned.admit() for owned in batch.owned or ()])
        except Exception:
            batch.is_admitted = True  # as far as can be: its lookup tries again, and says so
        batch.tried = turn

    def close(self) -> None:
        """End the thread, and take back what is announced."""
        with self._pending.moved:
            self.closed = True
            self._pending.moved.notify_all()
            if threading.current_thread() in self._threads:
                return  # garbage was collected there
        for thread in self._threads:
            thread.join()
        with self._pending.moved:
            self.busy = None
            for batch in self._pending.batches.values():
                batch.withdraw()


class PrefetchOnHost(PrefetchOnRanks):
    """The same of a memory host, which looks ahead for other ranks.

    Threading: one thread takes part in the rounds, and the window's brings rows up; methods are for the
    thread that answers the others.
    """

    def __init__(self, ranks: Ranks, *, rows_ahead: bool = False) -> None:
        """Called by all ranks. `rows_ahead`: as of `PrefetchOnRanks`."""
        super().__init__(ranks, rows_ahead=rows_ahead)
        self._pending = _Pending()
        self._host_window: _HostWindow | None = None
        self._is_over = False  # the others' loop has no more batches
        self._spent = self._spent_before = 0  # what the others have told last, and before that
        self._follows = False

    def begin(self) -> None:
        """Bring rows up from now on, if all tables have their place."""
        is_open = self._host_window is not None and not self._host_window.closed
        if is_open or not self.allocate_all():
            return
        self._host_window = window = _HostWindow(self._pending, self.ids_ahead() or 0)
        for tiers in self.tiers:
            tiers.open_window(window)
        if not self._follows:
            self._follows = True
            self.rounds.call(self._follow)

    def end(self) -> None:
        """Bring no rows up any more."""
        if self._host_window is not None:
            self._host_window.close()
        self.drop_offers()

    def holds_back(self) -> bool:
        """Return True if no rows of this rank are to be sent ahead, nor those that were to be used."""
        if self.beside is None:
            return False
        with self._pending.moved:
            sent = [batch.travelled.rows_ahead for batch in self._pending.batches.values()]
        stale = any(one is not None and not one.is_good for one in sent)
        return stale or any(live.follows for live in self.shards)

    def take(self, number: int, told: RowsTold) -> tuple[ServedLookup, Travelled | None]:
        """Return the batch that the others have asked for in a round and look up now, whose rows are found;
        and the one behind it, if its rows are to be sent ahead.

        Args:
            told: by the others, of rows that are sent ahead.

        Raises:
            TableError: this rank could not take part in that round, or in that of the batch behind it.
        """
        pending = self._pending
        self.drop_offers()
        with pending.moved, trace.span("wait for rows"):
            last = max(number, told.next_round)
            pending.moved.wait_for(lambda: pending.round >= last or self.rounds.is_lost)
            batch = pending.batches.pop(number, None)
            if batch is None or pending.round < last:
                # The others do not hear of it but by the end of the group, as they wait for rows.
                raise TableError(f"This rank has no ids of round {last}, which the others look up.")
            for dead in [n for n, other in pending.batches.items() if other.is_dead]:
                del pending.batches[dead]
            if (window := self._host_window) is not None:
                pending.moved.wait_for(lambda: not window.is_at(batch))
        for owned in batch.owned or ():
            owned.offer(False)
        batch.travelled.take_rows(told.are_good)
        return batch.sent, batch.travelled.next if told.next_round else None

    def go_on(self) -> None:
        """Try again what did not fit, as a lookup or a step is over."""
        with self._pending.moved:
            self._pending.turn += 1
            self._pending.moved.notify_all()
        self.begin()

    # -- on the thread of the rounds -------------------------------------------------------------

    def _follow(self) -> bool:
        pending, rounds = self._pending, self.rounds
        try:
            while (told := rounds.listen()) is not None:
                asked = self._asked(told[0].digest) if are_alike(told) else None
                with pending.moved:
                    self._drop(told)
                    pending.depth = max(one.depth for one in told) * rounds.kinds
                    if asked is not None:
                        pending.batches[rounds.count] = asked
                    pending.round = rounds.count
                    pending.moved.notify_all()
        finally:
            rounds.leave()
            with pending.moved:
                pending.moved.notify_all()
        return False

    def _drop(self, told: Sequence[Told]) -> None:
        """Take back what is announced of batches that a rank will not look up. Their ids stay until the next
        lookup, or until a rank has taken another batch: it may have closed its window in the middle of a
        lookup."""
        spent = max(one.spent for one in told)
        if spent > self._spent:
            self._spent_before, self._spent = self._spent, spent
        if self._is_over or any(one.is_closed for one in told):
            spent = self.rounds.count
        self._is_over = any(one.is_end for one in told)
        for number, batch in [*self._pending.batches.items()]:
            if number <= spent and not batch.is_dead:
                batch.is_dead = True
                batch.withdraw()
            if number <= self._spent_before:
                del self._pending.batches[number]

    def _asked(self, digest: int) -> AskedAhead | None:
        """Take part in sending the ids of a batch; None: the others want different things."""
        ranks, rounds = self.ranks, self.rounds
        room, *tables = rounds.describe(digest)
        width = AHEAD + len(bits((), len(tables))) + room
        ended = [rank in ranks.hosts for rank in range(ranks.size)]
        try:
            while True:
                values: Tensor = rounds.gather([0] * width)
                sent = ServedLookup.of(ranks, tables, values, ended, modes=0)
                if sent is not None:
                    sent.send(rounds)
                    return AskedAhead(sent, self.divide(digest, sent.by_rows()))
        except PeerError:
            return None
