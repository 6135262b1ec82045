"""The processes that share tables, and the message that opens each exchange between them."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hotbed.errors import HotbedError

__all__ = ["PeerError", "Ranks", "bytes_of", "numbers_in"]

_HEADER = 5
_ROOM = 1024
"""Numbers that go along with the opening message."""
_MOST_WAITING = 62
_TEXT = 2000
"""Bytes of a fault's text."""
_KINDS = ("a lookup", "a step", "a lookup of rows", "a distribution")


class PeerError(HotbedError, RuntimeError):
    """Another rank could not go on, so this one did not either; the message says which and why."""


class Ranks:
    """Processes that call the same things in the same order.

    Attributes:
        rank: of this one.
        size: how many there are.
        sent: bytes that this rank has sent to others so far, by what they were.
    """

    def __init__(self, ranks: Sequence[int] | None = None, timeout: float = 30.0) -> None:
        """Called by all processes of the default group.

        Args:
            ranks: those that take part. Default: all.
            timeout: seconds that a rank may keep the others waiting.
        """
        wait = datetime.timedelta(seconds=timeout)
        self.group = torch_dist.new_group(ranks, timeout=wait, backend="gloo")
        self.rank = torch_dist.get_rank(self.group)
        self.size = torch_dist.get_world_size(self.group)
        self.sent: dict[str, int] = {}
        self._sequence = 0
        self._waiting: list[tuple[weakref.ref[Any], Any]] = []

    @property
    def waiting(self) -> list[Any]:
        """Trips of the lookups whose gradients may be asked for, the same on all ranks, oldest first."""
        return [trip for _, trip in self._waiting]

    def wait_for(self, batch: Any, trip: Any) -> None:
        """Keeps a trip until no rank has its batch any more, as all find out when they next agree.

        Raises:
            PeerError: too many wait.
        """
        if len(self._waiting) == _MOST_WAITING:
            raise PeerError(
                f"{_MOST_WAITING} batches wait for a step, and no more can. Step, or look up under "
                "torch.no_grad() what is not trained on."
            )
        self._waiting.append((weakref.ref(batch), trip))

    def agree(
        self, kind: str, numbers: Sequence[int] = (), fault: BaseException | None = None
    ) -> Tensor:
        """Opens an exchange: all ranks are about to do the same, and none has a reason not to.

        Args:
            kind: what for.
            numbers: as many on each rank.
            fault: why this rank cannot.

        Returns:
            (ranks, n) int64: the numbers of each.

        Raises:
            PeerError: another rank has a fault, does something else, or is gone.
            BaseException: `fault`.
        """
        count = len(numbers)
        own = torch.zeros(_HEADER + _ROOM, dtype=torch.int64)
        alive = sum(1 << at for at, (batch, _) in enumerate(self._waiting) if batch() is not None)
        own[:_HEADER] = torch.tensor(
            [_KINDS.index(kind), self._sequence, fault is not None, count, alive]
        )
        own[_HEADER : _HEADER + min(count, _ROOM)] = torch.tensor(
            numbers[:_ROOM], dtype=torch.int64
        )
        self._sequence += 1
        told = self._gathered(own)
        if bool(told[:, 2].any()):
            self._raise_fault(told[:, 2].tolist(), fault)
        self._refuse_others(told, kind)
        for at in reversed(range(len(self._waiting))):
            if not bool((told[:, 4] >> at & 1).any()):
                del self._waiting[at]
        if count <= _ROOM:
            return told[:, _HEADER : _HEADER + count]
        return self._gathered(torch.tensor(numbers, dtype=torch.int64))

    def _refuse_others(self, told: Tensor, kind: str) -> None:
        for rank, (other, sequence, _, count) in enumerate(told[:, :4].tolist()):
            if [other, sequence, count] != told[self.rank, [0, 1, 3]].tolist():
                raise PeerError(
                    f"Rank {rank} is at {_KINDS[other]} ({count} numbers, exchange {sequence}) while rank "
                    f"{self.rank} is at {kind} ({int(told[self.rank, 3])}, {int(told[self.rank, 1])}). All "
                    "ranks must look up and step the same tables in the same order."
                )

    def _raise_fault(self, faults: list[int], own: BaseException | None) -> None:
        text = torch.zeros(_TEXT, dtype=torch.uint8)
        raw = f"{type(own).__name__}: {own}".encode()[:_TEXT] if own is not None else b""
        text[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        told = self._gathered(text)
        if own is not None:
            raise own
        rank = faults.index(1)
        said = bytes(told[rank].tolist()).rstrip(b"\0").decode(errors="replace")
        raise PeerError(f"Rank {rank} could not go on: {said}")

    def exchange(self, what: str, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Sends bytes to each rank, and receives those that each has for this one.

        Args:
            parts: (bytes,) uint8 for each rank.
            sizes: bytes that each rank sends here.

        Raises:
            PeerError: a rank is gone.
        """
        outgoing = torch.cat(list(parts))
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        sent = [len(part) for part in parts]
        with _told():
            torch_dist.all_to_all_single(incoming, outgoing, list(sizes), sent, group=self.group)
        self.sent[what] = self.sent.get(what, 0) + sum(sent) - sent[self.rank]
        return list(torch.split(incoming, list(sizes)))

    def _gathered(self, own: Tensor) -> Tensor:
        told = [torch.empty_like(own) for _ in range(self.size)]
        with _told():
            torch_dist.all_gather(told, own, group=self.group)
        return torch.stack(told)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        raise PeerError(f"Another rank ended, or kept this one waiting too long: {text}") from None


def bytes_of(tensor: Tensor) -> Tensor:
    """(bytes,) uint8: the same memory."""
    flat: Any = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8)  # type: ignore[no-any-return]


def numbers_in(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """What bytes are of a dtype; a copy where they do not lie at a multiple of its size."""
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype)
