"""Batches that wait for gradients: the same list on all ranks, as all agree on who is let go."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from hotbed.dist.exchanged_values import KeptLookup

__all__ = ["WORD_BITS", "Waiting"]

WORD_BITS = 62
"""Batches that one int64 tells of."""
_MERGED_AT = 62
"""Waiting batches from which on gradients are merged; after a merge, twice what is left if that is more."""


class Listens(Protocol):
    def hear(self, lookup: KeptLookup) -> None:
        """Take note that gradients of a lookup come to the owners, on all ranks."""


class Waiting:
    """Lookups, oldest first, with the batch of each on this rank.

    Attributes:
        lookups: those whose gradients may be asked for.
        listeners: who hears of those whose gradients come to the owners.
    """

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[Listens] = weakref.WeakSet()
        self.lookups: list[KeptLookup] = []
        self._batches: list[weakref.ref[object] | None] = []
        self._merge_at = _MERGED_AT

    def __len__(self) -> int:
        return len(self.lookups)

    def add(self, batch: object | None, lookup: KeptLookup) -> None:
        """Keep a lookup until no rank has its batch any more. `batch`: None where there is none here."""
        self.lookups = [*self.lookups, lookup]
        self._batches.append(None if batch is None else weakref.ref(batch))

    def tell_of(self, lookup: KeptLookup) -> None:
        """Tell the listeners that its gradients come to the owners."""
        for one in self.listeners:
            one.hear(lookup)

    def alive(self) -> list[int]:
        """Return a bit for each batch that this rank has, in words of `WORD_BITS`; at least one word."""
        words = [0] * max(1, -(-len(self._batches) // WORD_BITS))
        for at, batch in enumerate(self._batches):
            if batch is not None and batch() is not None:
                words[at // WORD_BITS] |= 1 << at % WORD_BITS
        return words

    def let_go(self, alive: Sequence[Sequence[int]]) -> None:
        """Drop the batches that no rank has. `alive`: the words of each rank."""
        kept = [
            at
            for at in range(len(self._batches))
            if any(words[at // WORD_BITS] >> at % WORD_BITS & 1 for words in alive)
        ]
        if len(kept) < len(self._batches):
            self.lookups = [self.lookups[at] for at in kept]
            self._batches = [self._batches[at] for at in kept]

    @property
    def to_be_merged(self) -> bool:
        """True if so many wait that what they left is to become one batch."""
        return len(self.lookups) >= self._merge_at

    def merged(self) -> None:
        """Set the next limit, beyond the batches that stay as their backward is yet to come."""
        self._merge_at = max(_MERGED_AT, 2 * len(self.lookups))
