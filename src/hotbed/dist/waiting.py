"""Batches that wait for gradients: the same list on all ranks, as all agree on who is let go; and gradients
that clipping has brought to their owners, of which each handshake tells those that have no batches."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Protocol

from hotbed.dist.exchanged_values import KeptLookup

__all__ = ["WORD_BITS", "AtOwners", "Waiting"]

WORD_BITS = 62
"""Batches that one int64 tells of."""
_STATE_BITS = 2
_WORD_TABLES = WORD_BITS // _STATE_BITS
"""Tables whose `AtOwners` one int64 tells of."""
_MERGED_AT = 62
"""Waiting batches from which on gradients are merged; after a merge, twice what is left if that is more."""


class Listens(Protocol):
    def hear(self, lookup: KeptLookup) -> None:
        """Take note that gradients of a lookup come to the owners, on all ranks."""


class AtOwners(enum.IntEnum):
    """Gradient of a table that clipping has brought to its owners, as one rank knows it."""

    NOTHING = 0
    """There is none, or zero_grad() has given it up."""
    EMPTY = 1
    """zero_grad(set_to_none=False) has left no row of it; a step counts."""
    ROWS = 2


class Clipped(Protocol):
    """Gradient of one table on this rank."""

    at_owners: AtOwners

    def follow(self, state: AtOwners) -> None:
        """Give up what the ranks with batches have given up."""


class Waiting:
    """Lookups, oldest first, with the batch of each on this rank.

    Attributes:
        lookups: those whose gradients may be asked for.
        clipped: gradients that may lie at their owners, by number of the table.
        listeners: who hears of those whose gradients come to the owners.
    """

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[Listens] = weakref.WeakSet()
        self.lookups: list[KeptLookup] = []
        self.clipped: weakref.WeakValueDictionary[int, Clipped] = weakref.WeakValueDictionary()
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

    def states(self) -> list[int]:
        """Return what this rank tells of gradients at their owners, in words; none where there are none."""
        words: list[int] = []
        for number, one in sorted(self.clipped.items()) if self.clipped else ():
            at = number // _WORD_TABLES
            words += [0] * (at + 1 - len(words))
            words[at] |= one.at_owners << number % _WORD_TABLES * _STATE_BITS
        return words

    def read_states(
        self, words: Sequence[Sequence[int]], ended: Sequence[bool], own: int
    ) -> dict[int, list[AtOwners]]:
        """Return the states of tables, by number, as each rank with batches tells them. Where this rank has
        none, its gradients follow: those that all others have given up go.

        Args:
            words: `states` of each rank.
            ended: which of them have no batches.
            own: this rank.
        """
        told: dict[int, list[AtOwners]] = {}
        with_batches = [row for row, has_ended in zip(words, ended, strict=True) if not has_ended]
        for at, of_ranks in enumerate(zip(*with_batches, strict=True)):
            for n in range(_WORD_TABLES if any(of_ranks) else 0):
                states = [AtOwners(word >> n * _STATE_BITS & 3) for word in of_ranks]
                if any(states):
                    told[at * _WORD_TABLES + n] = states
        if ended[own]:
            for number, one in list(self.clipped.items()):
                one.follow(max(told.get(number, [AtOwners.NOTHING])))
        return told

    @property
    def to_be_merged(self) -> bool:
        """True if so many wait that what they left is to become one batch."""
        return len(self.lookups) >= self._merge_at

    def merged(self) -> None:
        """Set the next limit, beyond the batches that stay as their backward is yet to come."""
        self._merge_at = max(_MERGED_AT, 2 * len(self.lookups))
