"""Messages through shared memory between ranks of a machine, and over Gloo between machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.dist.shared_memory import Member, SharedMemory
from hotbed.dist.wire import Gloo, Wire

__all__ = ["MixedWire", "fastest_wire"]

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def fastest_wire(
    gloo: Gloo,
    rank: int,
    seconds: float,
    machine: Sequence[int],
    tell: Callable[[object], list[Any]],
) -> Wire:
    """Return `SharedMemory` if all ranks see each other's memory, `MixedWire` if some do, else `gloo`.
    Called by all ranks.

    Args:
        seconds: timeout.
        machine: ranks that may share memory with this one, itself among them, rising.
        tell: gives what each rank says.
    """
    own = Member.offered()
    members: dict[int, Member] = {}
    for source, address in enumerate(tell(None if own is None else own.address)):
        if source == rank and own is not None:
            members[source] = own
        elif source in machine and own is not None:
            found = Member.seen(address)
            if found is not None:
                members[source] = found
    seen: list[list[int]] = tell([*members])
    mutual = [every for every in seen if all(seen[other] == every for other in every)]
    are_whole = len(mutual) == len(seen) and {len(every) for every in seen} == {len(machine)}
    if mutual.count([*range(len(seen))]) == len(seen):
        return SharedMemory(gloo, rank, seconds, members)
    near = seen[rank]
    if len(near) < 2 or near not in mutual:
        return gloo
    return MixedWire(gloo, SharedMemory(gloo, rank, seconds, members), near, are_whole)


class MixedWire:
    """`hotbed.dist.wire.Wire`. All ranks send over Gloo, also where nothing but a word crosses, so that each
    hears the words of all; but for messages among the ranks of each machine, of which Gloo knows nothing."""

    def __init__(
        self, gloo: Gloo, of_machine: SharedMemory, near: Sequence[int], are_whole: bool
    ) -> None:
        """
        Args:
            gloo: between all ranks.
            of_machine: between the ranks of `near` alone, which are rising.
            are_whole: True if on each machine all ranks see each other's memory.
        """
        self._gloo, self._of_machine, self._near = gloo, of_machine, list(near)
        self._are_whole = are_whole

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        inside = self._of_machine.reserve([sizes[rank] for rank in self._near])
        return self._joined(self._gloo.reserve(self._crossing(sizes)), inside)

    def send(
        self, sizes: Sequence[int], word: int, heard_by: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        near = [sizes[rank] for rank in self._near]
        if self._are_whole and heard_by is not None and list(heard_by) == self._near:
            inside, words = self._of_machine.send(near, word)
            return self._joined([_NOTHING] * len(sizes), inside), words
        end = self._gloo.begin(self._crossing(sizes), word)  # which takes longer
        inside, _ = self._of_machine.send(near, word)
        messages, words = end()
        return self._joined(messages, inside), words

    def gather(self, own: Tensor) -> Tensor:
        return self._gloo.gather(own)

    def leave(self) -> None:
        self._of_machine.leave()  # which leaves Gloo, too

    def _crossing(self, sizes: Sequence[int]) -> list[int]:
        """Return sizes of messages to, or from, other machines."""
        return [0 if rank in self._near else size for rank, size in enumerate(sizes)]

    def _joined(self, crossing: list[Tensor], inside: Sequence[Tensor]) -> list[Tensor]:
        for rank, message in zip(self._near, inside, strict=True):
            crossing[rank] = message
        return crossing
