"""Messages on a Gloo group of its own, beside what the ranks exchange otherwise."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hotbed import _core
from hotbed.dist.errors import PeerError
from hotbed.dist.ranks import Ranks
from hotbed.dist.wire import Gloo, group_of

__all__ = ["Beside"]


class Beside:
    """`hotbed.dist.exchanged_values.Gathering` of one thread.

    Attributes:
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        wait: datetime.timedelta,
        awake: threading.Lock | None = None,
    ) -> None:
        """Called by all ranks.

        Args:
            name: under which bytes are counted.
            wait: how long an exchange may take.
            awake: as of `Gloo`.
        """
        assert ranks.group is not None
        members = torch_dist.get_process_group_ranks(ranks.group)
        called = "hotbed.distribute"
        group = group_of(self, called, ranks.timeout, members, timeout=wait, backend="gloo")
        self.rank, self.size = ranks.rank, ranks.size
        self._wire, self._sent, self._name = Gloo(group, self.rank, awake=awake), ranks.sent, name
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
