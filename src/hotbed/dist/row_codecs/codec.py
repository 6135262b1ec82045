"""`RowCodec`: how rows are laid out in the messages of one exchange, and which rows those are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.layout import Layout

__all__ = ["Piece", "RowCodec", "Travel"]


class Piece(NamedTuple):
    """Rows of one shard in a message, as the core has them."""

    rows: int
    width: int
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Travel:
    """Rows of one batch that travel one way."""

    core: _core.Exchange
    layout: Layout
    to_owners: bool = False
    """True if they travel from who asks for rows to those who own them."""
    chosen: Sequence[bool] = ()
    """Where they do, for each table whether any of it travels."""

    def pieces(self, *, sent: bool) -> list[list[Piece]]:
        """Return the pieces of the message to each rank, or of the one from it."""
        own, ranks = self.layout.rank, range(self.layout.size)
        here_owns = sent is not self.to_owners
        pairs = [(own, other) if here_owns else (other, own) for other in ranks]
        return [self._of_pair(owner, requester) for owner, requester in pairs]

    def _of_pair(self, owner: int, requester: int) -> list[Piece]:
        found = []
        for s in self.layout.core.kept_by[owner]:
            t, shard, spec = self.layout.shards[s]
            if self.to_owners:
                travels, dtype = self.chosen[t], spec.compute_dtype
            else:
                travels, dtype = not shard.replica or owner == requester, spec.dtype
            if travels:
                found.append(Piece(self.core.count(requester, s), shard.part.dim, dtype))
        return found


class RowCodec(Protocol):
    """Layout of rows in the messages of one direction.

    The core writes and reads messages as it has rows in memory; a codec says in which form they travel.

    Attributes:
        can_fail: True if `decode` may raise: with such a codec of rows the ranks vote once more in each
        lookup.
    """

    @property
    def can_fail(self) -> bool: ...

    def sizes(self, in_core: list[int], travel: Travel, *, sent: bool) -> list[int]:
        """Return the bytes of the message to each rank, or from it, where the core's has `in_core`."""

    def buffers(self, messages: list[Tensor], in_core: list[int]) -> list[Tensor]:
        """Return the memory to which the core writes what these messages are to say."""

    def encode(self, buffers: list[Tensor], messages: list[Tensor], travel: Travel) -> None:
        """Write the messages, once the core has written to `buffers`."""

    def decode(self, messages: list[Tensor], in_core: list[int], travel: Travel) -> list[Tensor]:
        """Return the messages that came, as the core reads them."""
