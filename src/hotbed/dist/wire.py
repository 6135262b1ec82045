"""How bytes come from rank to rank: over Gloo, or through memory that processes of one machine share."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import distributed_c10d

from hotbed import _core
from hotbed.dist.errors import PeerError
from hotbed.dist.raw import WORD, rounded
from hotbed.dist.timeouts import meet

__all__ = ["Gloo", "Wire", "group_of"]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 5e-3
"""Seconds between two looks whether others have answered."""
_LOOKS = 1e-3
"""Seconds that a thread looks, and lets others run in between, before it sleeps: threads that wake each other
up are put on the same core, where they take turns for milliseconds."""
_MOST_AT_ONCE = 16
"""Ranks that gather numbers by sending them to each other at once. An `all_gather` passes them round a ring,
one step a rank; but machines of many ranks send each other less by it."""


class Wire(Protocol):
    """Brings each rank a message of each other one, and a word.

    Raises:
        RuntimeError: a rank cannot be reached any more.
    """

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for the messages to all ranks, (bytes,) uint8 each, to be written to before `send`.

        Args:
            sizes: in bytes; 0 for the own rank.
        """

    def send(
        self, sizes: Sequence[int], word: int, heard_by: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        """Send the memory that `reserve` gave. Called by all ranks.

        Args:
            sizes: of the messages that come, in bytes; 0 from the own rank.
            word: for all other ranks.
            heard_by: ranks that must hear the word, this one among them, where messages go to none but
                these; None: all ranks.

        Returns:
            The messages of all ranks, which stay until the next `send`, and their words; only those of
            `heard_by` where no others were heard.
        """

    def gather(self, own: Tensor) -> Tensor:
        """(ranks, n): (n,) numbers of each rank. Called by all ranks."""

    def leave(self) -> None:
        """The others hear that this rank takes part in nothing any more."""


class Gloo:
    """`Wire`, by one all_to_all_single; the words lie before the messages."""

    def __init__(
        self, group: torch_dist.ProcessGroup, rank: int, *, awake: threading.Lock | None = None
    ) -> None:
        """`awake`: held by the calling thread, which lets go of it to wait, outside of torch. None: it waits
        inside."""
        self._group: torch_dist.ProcessGroup | None = group
        self._rank, self._awake = rank, awake
        self._outgoing, self._whole = _core.block(0), [0]

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        self._whole = self._with_words(sizes)
        self._outgoing = _core.block(sum(self._whole))
        return _messages(self._outgoing, self._whole, sizes)

    def send(
        self, sizes: Sequence[int], word: int, heard_by: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        return self.begin(sizes, word)()

    def begin(
        self, sizes: Sequence[int], word: int
    ) -> Callable[[], tuple[list[Tensor], list[int]]]:
        """Begin to do as `send`. Return what waits for its end."""
        for at in _begins(self._whole):
            self._outgoing[at : at + WORD].view(torch.int64).fill_(word)
        outgoing, self._outgoing = self._outgoing, _core.block(0)
        whole = self._with_words(sizes)
        incoming = _core.block(sum(whole))
        work = torch_dist.all_to_all_single(
            incoming, outgoing, whole, self._whole, group=self._group, async_op=True
        )

        def end() -> tuple[list[Tensor], list[int]]:
            self._wait(work)
            words = [int(incoming[at : at + WORD].view(torch.int64)) for at in _begins(whole)]
            words.insert(self._rank, word)
            return _messages(incoming, whole, sizes), words

        return end

    def gather(self, own: Tensor) -> Tensor:
        size, group = torch_dist.get_world_size(self._group), self._group
        reported = own.new_empty((size, *own.shape))
        if size <= _MOST_AT_ONCE and self._awake is None:
            copies = own.expand_as(reported).contiguous()
            work = torch_dist.all_to_all_single(reported, copies, group=group, async_op=True)
        else:
            work = torch_dist.all_gather([*reported], own, group=group, async_op=True)
        self._wait(work)
        return reported

    def _wait(self, work: torch_dist.Work | None) -> None:
        """Return when it is done. None: it is."""
        if work is None:
            return
        if self._awake is None:
            looks_end = time.perf_counter() + _LOOKS
            while not work.is_completed() and time.perf_counter() < looks_end:
                os.sched_yield()
        else:
            pause = _SHORTEST_PAUSE
            while not work.is_completed():
                self._awake.release()
                time.sleep(pause)
                self._awake.acquire()
                pause = min(1.5 * pause, _LONGEST_PAUSE)
        work.wait()  # raises what has happened

    def leave(self) -> None:
        group, self._group = self._group, None
        _end(group)

    def _with_words(self, sizes: Sequence[int]) -> list[int]:
        return [0 if r == self._rank else WORD + rounded(size) for r, size in enumerate(sizes)]


def group_of(
    owner: object, called: str, seconds: float, ranks: Sequence[int] | None = None, **options: Any
) -> torch_dist.ProcessGroup:
    """A group of processes that goes with `owner`. Called by all of them.

    Args:
        called: what the user has called.
        seconds: that a rank may keep the others waiting here.
        ranks: those that take part. Default: all.
        options: of ``torch.distributed.new_group``.

    Raises:
        PeerError: not all ranks have called it, or one has ended meanwhile.
    """
    while _unended:
        _end(_unended.pop())
    if ranks is not None and len(ranks) == torch_dist.get_world_size():
        ranks = None
    number = meet(called, seconds, ranks)
    try:
        with _naming_group_of(ranks, f"hotbed/{number}"):
            group: torch_dist.ProcessGroup = torch_dist.new_group(
                ranks, use_local_synchronization=ranks is not None, **options
            )
    except RuntimeError as error:
        raise PeerError(
            f"{called} could not connect the ranks; did one of them end meanwhile? torch says: {error}"
        ) from error
    # Not the group itself: its connections end with the last who has it.
    weakref.finalize(owner, _end_in, os.getpid(), weakref.ref(group)).atexit = False
    return group


@contextlib.contextmanager
def _naming_group_of(ranks: Sequence[int] | None, name: str) -> Iterator[None]:
    """For a ``with`` statement: torch gives a group of these ranks this name, if they are some. Its own is
    made of their numbers and of how many groups there are, so it differs where one rank has let go of a
    group before the others. Where all have, it is that of the earlier group, whose addresses are in the store
    yet."""
    made_of = vars(distributed_c10d).get("_hash_ranks_to_str")
    if made_of is None or ranks is None:  # another torch, or all ranks
        yield
        return
    own = sorted(ranks)

    def named(some: Iterable[int]) -> str:
        given: str = name if sorted(some) == own else made_of(some)  # of another thread
        return given

    vars(distributed_c10d)["_hash_ranks_to_str"] = named
    try:
        yield
    finally:
        vars(distributed_c10d)["_hash_ranks_to_str"] = made_of


_unended: list[torch_dist.ProcessGroup] = []
"""Groups whose owners have ended on daemon threads; the next `group_of` ends them."""


def _end_in(process: int, kept: weakref.ref[torch_dist.ProcessGroup]) -> None:
    """Nothing in a forked process: a group waits for its threads when it ends, and has none of them there.

    A daemon thread that ends a group while the interpreter ends would abort the process.
    """
    group = kept()
    if group is None or os.getpid() != process:
        return
    if threading.current_thread().daemon:
        _unended.append(group)
    else:
        _end(group)


def _end(group: torch_dist.ProcessGroup | None) -> None:
    """Closes its connections, if nobody else has it. None: it has ended."""
    if group is not None:  # which torch would take for all groups
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # it has ended
            torch_dist.destroy_process_group(group)


def _begins(whole: Sequence[int]) -> list[int]:
    """Return where each message begins, with its words."""
    ends = itertools.accumulate(whole)
    return [end - size for end, size in zip(ends, whole, strict=True) if size]


def _messages(memory: Tensor, whole: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Without their words."""
    pieces = torch.split(memory, list(whole))
    return [
        piece[WORD : WORD + size] if len(piece) else piece
        for piece, size in zip(pieces, sizes, strict=True)
    ]
