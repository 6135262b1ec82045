"""`Travel`: rows of one exchange, each table's in the form of its codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from hotbed import _core
from hotbed.dist.layout import Layout
from hotbed.dist.raw import rounded
from hotbed.dist.row_codecs.codec import Piece, RowCodec, Spot

__all__ = ["Travel"]


@dataclasses.dataclass(frozen=True, slots=True)
class Travel:
    """Rows, vectors or gradients of one batch that travel one way."""

    layout: Layout
    codecs: Sequence[RowCodec]
    """Of each of the core's tables."""
    counts: Callable[[int, int], int]
    """Rows of a requesting rank and a shard."""
    to_owners: bool = False
    """True if they travel from who asks for rows to those who own them."""
    stored: bool = False
    """True if they have the dtype of their table, else its compute dtype."""
    chosen: Sequence[bool] | None = None
    """For each of the core's tables whether any of it travels; None: of all."""
    seeds: Sequence[int] | None = None
    """For each of the core's tables, of what is rounded at random."""

    def sizes(self, *, sent: bool) -> list[int]:
        """Return the bytes of the message to each rank, or from it."""
        return [sum(map(_bytes, pieces)) for pieces in self._pieces(sent=sent)]

    def buffers(self, in_core: list[int]) -> list[Tensor]:
        """Return the memory to which the core writes what messages are to say."""
        return [_core.block(size) for size in in_core]

    def encode(self, buffers: list[Tensor], messages: list[Tensor]) -> None:
        """Write the messages, once the core has written to `buffers`."""
        for codec, spots in self._spots(buffers, messages, sent=True):
            codec.encode(spots)

    def decode(self, messages: list[Tensor], in_core: list[int]) -> list[Tensor]:
        """Return the messages that came, as the core reads them."""
        buffers = self.buffers(in_core)
        for codec, spots in self._spots(buffers, messages, sent=False):
            codec.decode(spots)
        return buffers

    def _spots(
        self, buffers: list[Tensor], messages: list[Tensor], *, sent: bool
    ) -> Iterator[tuple[RowCodec, list[Spot]]]:
        """Pieces and where they are, by codec."""
        found: dict[int, tuple[RowCodec, list[Spot]]] = {}
        every = self._pieces(sent=sent)
        for in_core, message, pieces in zip(buffers, messages, every, strict=True):
            at = begin = 0
            for piece in pieces:
                _, spots = found.setdefault(id(piece.codec), (piece.codec, []))
                spots.append(Spot(piece, in_core, at, message, begin))
                at += rounded(piece.rows * piece.width * piece.dtype.itemsize)
                begin += _bytes(piece)
        yield from found.values()

    def _pieces(self, *, sent: bool) -> list[list[Piece]]:
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
                travels = self.chosen is None or self.chosen[t]
            else:
                travels = not shard.replica or owner == requester
            if travels:
                count = self.counts(requester, s)
                seed = 0 if self.seeds is None else self.seeds[t]
                dtype = spec.dtype if self.stored else spec.compute_dtype
                found.append(Piece(count, shard.part.dim, dtype, self.codecs[t], seed))
        return found


def _bytes(piece: Piece) -> int:
    return rounded(piece.rows * piece.row_bytes)
