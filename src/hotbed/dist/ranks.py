"""The processes that share tables, and the message that opens each exchange between them."""

from __future__ import annotations

import contextlib
import datetime
import functools
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hotbed import _core, trace
from hotbed.dist.declarations import Declaration
from hotbed.dist.dense_gradients import DenseGradients
from hotbed.dist.errors import NO_COPY, PeerError, PeerLost, is_gone, is_known_to_all
from hotbed.dist.handshake import (
    ENDED,
    KINDS,
    Handshake,
    exchange_in_words,
    raise_fault,
    refuse_absent,
    refuse_other_tables,
    refuse_others,
    refuse_sizes,
)
from hotbed.dist.json_values import all_values
from hotbed.dist.layout import Layout
from hotbed.dist.long_work import LongWork
from hotbed.dist.machines import Machines
from hotbed.dist.mixed_wire import fastest_wire
from hotbed.dist.shards import ShardedPlace, TableOnRanks
from hotbed.dist.timeouts import WaitReports
from hotbed.dist.waiting import Waiting
from hotbed.dist.wire import Gloo, Wire, group_of
from hotbed.errors import TableError

__all__ = ["Ranks"]

_MOST_VALUES = 1022
"""Values that go along with a handshake; more are gathered after it."""
_PATIENCE = 1e6
"""Seconds that a memory host waits for the others, unless they are gone."""
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

_KIND, _SEQUENCE, _FAULT, _COUNT, _ALIVE, _TABLES = range(6)
_MEANT, _WANTS_END, _DECLARED, _CLIPPED, _HOLDS_BACK, _HEADER = range(6, 12)
_alike = operator.itemgetter(_KIND, _SEQUENCE, _DECLARED, _COUNT)
_ENDED = KINDS.index(ENDED)


class Ranks(LongWork):
    """Processes that call the same things in the same order.

    Attributes:
        rank: of this one.
        size: how many there are.
        hosts: those of them that are memory hosts, rising: they keep rows and have no batches.
        machines: that they lie on; None: nobody has said how many ranks each has.
        timeout: seconds that a rank may keep the others waiting.
        tables: of the models that they share, by number.
        waiting: lookups whose gradients may be asked for, the same on all ranks.
        steps: that they have taken together.
        sent: bytes that this rank has sent to others so far, by what they were.
        served: ids that ranks have asked of the shards of this rank so far.
        inside_forward: whether dense gradients of what is looked up will be averaged.
        before_forward: what is to be called before a model is called; or tables, where those are all.
        dense: gradients of dense parameters; None: none are averaged.
        beside: a second group, on which one thread may ask while another answers for the shards.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        timeout: float = 30.0,
        *,
        shared_memory: bool = True,
        memory_host: bool = False,
        local_world_size: int | None = None,
    ) -> None:
        """Called by all processes of the default group.

        Args:
            ranks: those that take part. Default: all.
            shared_memory: whether those that see it exchange rows through it, and not over Gloo.
            memory_host: whether this one is. It waits for the others as long as they live.
            local_world_size: ranks of a machine, which lie side by side. None: any may share memory.
        """
        patience = _PATIENCE if memory_host else timeout
        wait = datetime.timedelta(seconds=patience)
        self.group: torch_dist.ProcessGroup | None = group_of(
            self, "hotbed.distribute", timeout, ranks, timeout=wait, backend="gloo"
        )
        self.rank = torch_dist.get_rank(self.group)
        self.size = torch_dist.get_world_size(self.group)
        self.timeout = timeout
        self.hosts: tuple[int, ...] = ()
        self.tables: list[weakref.ref[TableOnRanks]] = []
        self.steps = 0
        self.sent: dict[str, int] = {}
        self.served = 0
        self.inside_forward = True
        self.before_forward: Callable[[], None] | None = None
        self.beside: torch_dist.ProcessGroup | None = None
        self.dense: DenseGradients | None = None
        self.wants_end = self.end_wanted = False
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._known: list[tuple[int, ...]] = []
        self._sequence = self._reserved = 0
        self._own_message = _NOTHING
        self._call: tuple[str, int, Sequence[int]] = "a distribution", 0, ()
        self._process = os.getpid()
        self._lost: PeerLost | None = None
        self.waiting = Waiting()
        self._reports = WaitReports(self.group, self.rank, self.size, timeout)
        gloo = Gloo(self.group, self.rank)
        self._wire: Wire = gloo
        own = [shared_memory, memory_host, local_world_size or 0]
        told = _int64([own]) if self.size == 1 else self.handshake("a distribution", own).values
        self.machines = Machines.agreed(self.rank, told[:, 2].tolist())
        if self.size > 1 and bool(told[:, 0].all()):
            tell = functools.partial(self.values_of_all, "a distribution")
            near = range(self.size) if self.machines is None else self.machines.here
            self._wire = fastest_wire(gloo, self.rank, patience, near, tell)
        self.hosts = tuple(torch.nonzero(told[:, 1]).flatten().tolist())

    @property
    def trainers(self) -> int:
        """Return the number of ranks that have batches, or had some: over these gradients are averaged."""
        return self.size - len(self.hosts)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TableError(f"This model is distributed, so {NO_COPY}")

    def table(self, number: int) -> TableOnRanks:
        """A live table that they share."""
        live = self.tables[number]()
        assert live is not None, "the ranks let go of a model at the same time"
        return live

    def layout(self, places: Sequence[ShardedPlace]) -> Layout:
        """Where their shards lie in messages."""
        numbers = (*[place.number for place in places],)
        found = self._layouts.get(numbers)
        if found is None:  # or another thread makes it, too
            found = self._layouts.setdefault(
                numbers, Layout.of_all(self.rank, self.size, self.trainers, places)
            )
        return found

    # -- the handshake ---------------------------------------------------------------------

    def handshake(
        self,
        kind: str,
        values: Sequence[int] = (),
        tables: Sequence[int] = (),
        fault: BaseException | None = None,
        declared: Declaration | None = None,
    ) -> Handshake:
        """Opens an exchange: all ranks are about to do the same, and none has a reason not to.

        Args:
            kind: what for, of `KINDS`.
            values: as many on each rank.
            tables: numbers of those concerned, the same on each rank.
            fault: why this rank cannot.
            declared: what must be alike on all ranks.

        Raises:
            PeerError: another rank has a fault, does something else, or is gone.
            HotbedError: the error of `declared`: another rank declares something else.
            BaseException: `fault`.
        """
        wanted = tuple(tables)
        head = [0] * _HEADER
        head[_KIND], head[_FAULT], head[_COUNT] = KINDS.index(kind), fault is not None, len(values)
        head[_TABLES] = self._known.index(wanted) if wanted in self._known else -1
        head[_MEANT] = len(wanted)
        head[_DECLARED] = 0 if declared is None else declared.digest
        return self._open(head, wanted, values, fault, declared)

    def serve(self, *, holds_back: bool = False) -> Handshake:
        """Take part in what the others do, where this one has no batch. `holds_back`: as of `Handshake`."""
        head = [0] * _HEADER
        head[_KIND], head[_HOLDS_BACK] = _ENDED, holds_back
        return self._open(head, None, None, None, None)

    def _open(
        self,
        head: list[int],
        tables: tuple[int, ...] | None,
        values: Sequence[int] | None,
        fault: BaseException | None,
        declared: Declaration | None,
    ) -> Handshake:
        """`tables`, `values`: None where this rank has ended."""
        head[_SEQUENCE], head[_WANTS_END] = self._sequence, self.wants_end
        self._call = KINDS[head[_KIND]], self._sequence, tables or ()
        head[_ALIVE], *more_alive = self.waiting.alive()
        clipped = self.waiting.states() if values is not None and self.waiting.clipped else []
        head[_CLIPPED] = len(clipped)
        self._sequence += 1
        some = [*head, *(values or ()), *clipped][: _HEADER + _MOST_VALUES]
        own = torch.zeros(_HEADER + _MOST_VALUES, dtype=torch.int64, device="cpu")
        own[: len(some)] = _int64(some)
        with trace.span("handshake"):
            reported = self._gathered(own)
        heads: list[list[int]] = reported[:, :_HEADER].tolist()
        ended = [head[_KIND] == _ENDED for head in heads]
        speaks = ended.index(False)  # a rank that has something to say
        of_all = [*zip(*heads, strict=True)]
        if any(of_all[_FAULT]):
            raise_fault(of_all[_FAULT], fault, self._gathered, self.size)
        said = {r: _alike(head) for r, head in enumerate(heads) if not ended[r]}
        if len(set(said.values())) > 1:
            names = {r: self._names(heads[r], r, tables or ()) for r in said}
            mine = self.rank if self.rank in said else min(said)
            refuse_others(said, mine, names, declared, self._gathered)
        kind = KINDS[heads[speaks][_KIND]]
        if any(ended):
            refuse_absent(kind, ended, self.hosts)
        found = self._tables_meant(heads, ended, speaks, tables)
        waiting = self.waiting.lookups
        more = self._gathered(_int64(more_alive)).tolist() if more_alive else [()] * self.size
        self.waiting.let_go([[head[_ALIVE], *rest] for head, rest in zip(heads, more, strict=True)])
        self.end_wanted = any(of_all[_WANTS_END])
        count, declares = heads[speaks][_COUNT], heads[speaks][_DECLARED]
        every_value = self._behind(reported, 0, values or (), count)
        states = {}
        if (most := max(of_all[_CLIPPED])) or self.waiting.clipped:  # told behind the values
            words = self._behind(reported, count, clipped, most).tolist()
            states = self.waiting.read_states(words, ended, self.rank)
        back = any(of_all[_HOLDS_BACK])
        return Handshake(kind, found, every_value, ended, waiting, declares, states, back)

    def _behind(self, reported: Tensor, begin: int, own: Sequence[int], count: int) -> Tensor:
        """(ranks, count) int64 behind all headers from `begin` on, or gathered where they have no room there.
        `own`: of this rank, or fewer."""
        if not count or begin + count <= _MOST_VALUES:
            return reported[:, _HEADER + begin : _HEADER + begin + count]
        return self._gathered(_int64([*own, *[0] * (count - len(own))]))

    def _names(self, head: list[int], rank: int, own: Sequence[int]) -> list[str] | int:
        """Return the names of the tables that a message is about, or how many they are."""
        if head[_TABLES] < 0 and rank != self.rank:
            return head[_MEANT]
        return self._names_of(self._known[head[_TABLES]] if head[_TABLES] >= 0 else own)

    def _names_of(self, tables: Sequence[int]) -> list[str]:
        return [live.name for n in tables if (live := self.tables[n]()) is not None]

    def _tables_meant(
        self, heads: list[list[int]], ended: list[bool], speaks: int, own: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        """Return the tables that are meant. Many are told by a number once they were told in full."""
        numbers = {head[_TABLES] for r, head in enumerate(heads) if not ended[r]}
        if len(numbers) == 1 and (known := numbers.pop()) >= 0:
            return self._known[known]
        width = max(head[_MEANT] for head in heads)
        mine = _int64([*(own or ()), *[-1] * (width - len(own or ()))])
        every = [tuple(n for n in row if n >= 0) for row in self._gathered(mine).tolist()]
        refuse_other_tables(every, ended, speaks)
        self._known.append(every[speaks])
        return every[speaks]

    @contextlib.contextmanager
    def reporting(self, kind: str, *, ends: bool = True) -> Iterator[None]:
        """Report errors raised inside before the exchange `kind` to the other ranks, which wait for it.
        Later ones that they have not heard of abort the group, if it `ends` by them."""
        sequence = self._sequence
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            if sequence != self._sequence:
                self._end_by(kind, error, ends)
            elif isinstance(error, Exception) and not is_known_to_all(error):
                with contextlib.suppress(PeerError):  # nobody is there to hear it
                    self.handshake(kind, fault=error)
            raise

    def _end_by(self, kind: str, error: BaseException, ends: bool) -> None:
        """The ranks do nothing together any more, unless all have heard of an error in the middle of it."""
        if ends and not is_known_to_all(error) and self._lost is None:
            self.lose(
                f"This rank could not go on in the middle of {kind}, and so the ranks are out of step. The "
                f"tables here are as {self.steps} steps have left them. ({type(error).__name__}: {error})"
            )

    def lose(self, text: str) -> PeerLost:
        """From now on there is nothing to do together. `text`: why."""
        self._lost = PeerLost(text)
        self._wire.leave()  # so that the others notice, too
        self.group = None
        return self._lost

    @contextlib.contextmanager
    def listening(self, waits: str = "") -> Iterator[None]:
        """Raise what torch raises inside when another process is gone as PeerError, and abort the group:
        later exchanges are refused.

        Args:
            waits: what this rank does inside, where it is no exchange.
        """
        self._refuse_lost()
        try:
            yield
        except RuntimeError as error:
            self._raise_lost(error, waits)

    def _refuse_lost(self) -> None:
        """Raise PeerError where the ranks do nothing together any more."""
        if self._lost is not None:
            raise self._lost
        if os.getpid() != self._process:
            raise PeerError(
                "A forked process takes no part in what ranks do together: it is not the rank that it was "
                "forked from. Read rows there before the fork, or start it by spawn."
            )

    def _raise_lost(self, error: RuntimeError, waits: str = "") -> NoReturn:
        """Raise an error of torch's as PeerError if it says that another process is gone, else itself."""
        if not is_gone(error):
            raise error
        if self._lost is None:
            call = exchange_in_words(*self._call[:2], self._names_of(self._call[2]))
            self.lose(self._reports.loss(error, self._call[0], call, waits, self.steps))
        raise self._lost or error from None

    def values_of_all(self, kind: str, value: object) -> list[Any]:
        """Return the value of each rank, of types that `json_values.encode` takes; of those that are not
        memory hosts, where these serve. Called by all ranks."""
        return all_values(self, kind, value)

    # -- bytes -----------------------------------------------------------------------------------

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for messages to all ranks, its own too, (bytes,) uint8 each, to be written before `send`."""
        own, self._reserved = self.rank, sum(sizes) - sizes[self.rank]
        messages = self._wire.reserve([*sizes[:own], 0, *sizes[own + 1 :]])
        messages[own] = self._own_message = _core.block(sizes[own])
        return messages

    def send(
        self,
        what: str,
        sizes: Sequence[int],
        fault: BaseException | None = None,
        heard_by: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Send the memory that `reserve` gave. Return what came from each rank, good until the next `send`.

        Args:
            what: the bytes are.
            sizes: of the messages that come, in bytes.
            fault: why those of this rank are none.
            heard_by: as of `Wire.send`.

        Raises:
            LocalFault, PeerError: another rank has a fault, sent other sizes, or is gone.
            BaseException: `fault`.
        """
        own = self.rank
        coming = [*sizes[:own], 0, *sizes[own + 1 :]]
        self._refuse_lost()
        try:
            with trace.span(f"send {what}"):
                messages, faults = self._wire.send(coming, int(fault is not None), heard_by)
        except RuntimeError as error:
            self._raise_lost(error)
        self.sent[what] = self.sent.get(what, 0) + self._reserved
        if any(faults):
            raise_fault(faults, fault, self._gathered, self.size)
        messages[own], self._own_message = self._own_message, _NOTHING
        if [*map(len, messages)] != [*sizes]:  # the core would read beyond them
            refuse_sizes(what, messages, sizes)
        return messages

    def gather(self, own: Sequence[int]) -> Tensor:
        """(ranks, n) int64: the numbers of each rank, as many of each."""
        return self._gathered(_int64(own))

    def _gathered(self, own: Tensor) -> Tensor:
        self._refuse_lost()
        try:
            return self._wire.gather(own)
        except RuntimeError as error:
            self._raise_lost(error)


def _int64(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
