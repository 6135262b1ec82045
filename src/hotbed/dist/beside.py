"""Messages on a Gloo group of its own, beside what the ranks exchange otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.errors import PeerError
from hotbed.dist.wire import Gloo

__all__ = ["Beside"]


class Beside:
    """`hotbed.dist.exchanged_values.Gathering` of one thread.

    Attributes:
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(self, wire: Gloo, rank: int, size: int, sent: dict[str, int], name: str) -> None:
        """
        Args:
            sent: bytes that this rank has sent, by what they were.
            name: under which these are counted there.
        """
        self.rank, self.size = rank, size
        self._wire, self._sent, self._name = wire, sent, name
        self._sent[name] = 0  # whoever reads them while others are sent finds the same names
        self._own_message = _core.block(0)

    def gather(self, own: Sequence[int]) -> Tensor:
        """(ranks, n) int64: the numbers of each rank."""
        return self._wire.gather(torch.tensor(list(own), dtype=torch.int64, device="cpu"))

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        own = self.rank
        self._sent[self._name] += sum(sizes) - sizes[own]
        messages = self._wire.reserve(self._without_own(sizes))
        messages[own] = self._own_message = _core.block(sizes[own])
        return messages

    def send(
        self,
        what: str,
        sizes: Sequence[int],
        fault: BaseException | None = None,
        heard_by: Sequence[int] | None = None,
    ) -> list[Tensor]:
        messages, faults = self._wire.send(self._without_own(sizes), fault is not None)
        if fault is not None:
            raise fault
        if any(faults):
            raise PeerError(f"Rank {faults.index(1)} could not send {what}.")
        messages[self.rank] = self._own_message
        return messages

    def begin(self, sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Begin to do as `send`. Return what waits for the messages."""
        end, own_message = self._wire.begin(self._without_own(sizes), 0), self._own_message

        def received() -> list[Tensor]:
            messages, _ = end()
            messages[self.rank] = own_message
            return messages

        return received

    def _without_own(self, sizes: Sequence[int]) -> list[int]:
        return [*sizes[: self.rank], 0, *sizes[self.rank + 1 :]]
