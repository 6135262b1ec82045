"""Ranks that share a machine, where a plan says how many do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hotbed.dist.raw import Messenger
from hotbed.errors import PlanError

__all__ = ["Machines", "Within", "of_all"]


class Machines(NamedTuple):
    """Machines with as many ranks each, side by side."""

    rank: int
    """Of this process among `size`."""
    size: int
    local_size: int
    """Ranks on a machine."""

    @classmethod
    def agreed(cls, rank: int, told: Sequence[int]) -> Machines | None:
        """Return the machines of which each rank has told the `local_size`; None: all told 0.

        Raises:
            PlanError: on all ranks, as they told different ones, or one that does not divide their number.
        """
        own, size = told[rank], len(told)
        for other, local in enumerate(told):
            if local != own:
                raise PlanError(
                    f"Rank {other} has local_world_size={local or None}, and rank {rank} {own or None}. Give "
                    "all ranks the same, the number of ranks on each machine."
                )
        if own and size % own:
            raise PlanError(
                f"local_world_size={own} does not divide the {size} ranks. It is the number of ranks on each "
                "machine, and all machines must have as many."
            )
        return cls(rank, size, own) if own else None

    @property
    def shape(self) -> tuple[int, int]:
        """Return (machines, ranks of each)."""
        return self.size // self.local_size, self.local_size

    @property
    def are_several(self) -> bool:
        """Return True if there are several, with several ranks each."""
        return 1 < self.local_size < self.size

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank on its machine."""
        return rank % self.local_size

    def machine(self, rank: int) -> int:
        """Return the number of a rank's machine."""
        return rank // self.local_size

    @property
    def here(self) -> range:
        """Return the ranks on the machine of this one."""
        begin = self.machine(self.rank) * self.local_size
        return range(begin, begin + self.local_size)

    @property
    def across(self) -> range:
        """Return the ranks, one on each machine, with the local rank of this one."""
        return range(self.local_rank(self.rank), self.size, self.local_size)


class Within:
    """`hotbed.dist.raw.Messenger` among some ranks, while all ranks do the same among theirs."""

    def __init__(
        self, messenger: Messenger, members: Sequence[int], suffix: str, *, tells_all: bool
    ) -> None:
        """
        Args:
            suffix: of the names under which bytes are counted.
            tells_all: True if all ranks hear of a fault.
        """
        self._messenger, self._members, self._suffix = messenger, members, suffix
        self._heard_by = None if tells_all else members
        self.rank, self.size = members.index(messenger.rank), len(members)

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        messages = self._messenger.reserve(of_all(sizes, self._members, self._messenger.size))
        return [messages[member] for member in self._members]

    def send(
        self,
        what: str,
        sizes: Sequence[int],
        fault: BaseException | None = None,
        heard_by: Sequence[int] | None = None,
    ) -> list[Tensor]:
        told = self._heard_by if heard_by is None else [self._members[at] for at in heard_by]
        coming = of_all(sizes, self._members, self._messenger.size)
        received = self._messenger.send(what + self._suffix, coming, fault, told)
        return [received[member] for member in self._members]


def of_all(sizes: Sequence[int], members: Sequence[int], count: int) -> list[int]:
    """Return sizes of messages of some ranks, and 0 of the others among `count`."""
    every = [0] * count
    for member, size in zip(members, sizes, strict=True):
        every[member] = size
    return every
