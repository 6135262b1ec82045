"""Batches that wait for gradients: the same list on all ranks, as all agree on who is let go."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

__all__ = ["WORD_BITS", "Waiting"]

WORD_BITS = 62
"""Batches that one int64 tells of."""
_MERGED_AT = 62
"""Batches whose gradients are merged at the earliest."""


class Waiting:
    """Trips of lookups, oldest first, with the batch of each on this rank."""

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[Any] | None, Any]] = []
        self._merge_at = _MERGED_AT

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def trips(self) -> list[Any]:
        return [trip for _, trip in self._entries]

    def add(self, batch: Any, trip: Any) -> None:
        """Keep a trip until no rank has its batch any more. `batch`: None where there is none here."""
        self._entries.append((None if batch is None else weakref.ref(batch), trip))

    def alive(self) -> list[int]:
        """Return a bit for each batch that this rank has, in words of `WORD_BITS`; at least one word."""
        words = [0] * max(1, -(-len(self._entries) // WORD_BITS))
        for at, (batch, _) in enumerate(self._entries):
            if batch is not None and batch() is not None:
                words[at // WORD_BITS] |= 1 << at % WORD_BITS
        return words

    def let_go(self, alive: Sequence[Sequence[int]]) -> None:
        """Drop the batches that no rank has. `alive`: the words of each rank."""
        words = [functools.reduce(operator.or_, word) for word in zip(*alive, strict=True)]
        self._entries = [
            entry
            for at, entry in enumerate(self._entries)
            if words[at // WORD_BITS] >> at % WORD_BITS & 1
        ]

    @property
    def to_be_merged(self) -> bool:
        """True if so many wait that what they left is to become one batch."""
        return len(self._entries) >= self._merge_at

    def merged(self) -> None:
        """Set the next limit, beyond the batches that stay as their backward is yet to come."""
        self._merge_at = max(_MERGED_AT, 2 * len(self._entries))
