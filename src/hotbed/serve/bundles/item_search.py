"""Vectors of all items in a bundle, and the best of them for a user.

Shapes: N items, Q users, w columns of a vector.
"""

from __future__ import annotations

import os
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hotbed.serve.bundles.bundle import ITEM_IDS, ITEM_VECTORS, TopKEntry
from hotbed.serve.bundles.mapped import mapped

__all__ = ["Best", "ItemVectors"]

_SCORES = 1 << 22
"""Products that are in memory at a time, and numbers of vectors that are compared again."""
_QUERIES, _LEAST, _MOST = 256, 4096, 65_536
"""Most users at a time, and least and most items in a block."""
_SPARE = 16
"""Items beyond k that are compared again, as rounding may have put them behind."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Best(NamedTuple):
    """Result of a search."""

    ids: Ints
    """(Q, k), the best first; of as many columns as there are items, where these are fewer than k."""
    scores: Floats
    """(Q, k) float32."""


class ItemVectors:
    """Ids and vectors of items, mapped into memory. Several threads may search at once.

    Args:
        folder: the bundle's.
        about: what its manifest says of them.
        version: folder of the version whose vectors they are. Default: the bundle.

    Raises:
        BundleError: a file is damaged.
        OSError: as of files.
    """

    def __init__(self, folder: str, about: TopKEntry, version: str | None = None) -> None:
        count, width = about["items"], about["width"]
        self.ids = cast(Ints, mapped(os.path.join(folder, ITEM_IDS), np.int64, (count,)))
        """(N,), rising."""
        path = os.path.join(version or folder, ITEM_VECTORS)
        self.vectors = cast(Floats, mapped(path, np.float32, (count, width)))
        """(N, w) float32."""

    def search(self, users: Floats, k: int) -> Best:
        """Return the items whose products with each user's vector are largest, exactly.

        Products are summed in float64, and rounded. Of items with the same product the lower id is first.

        Args:
            users: (Q, w).
            k: how many, 1 or more.
        """
        wanted = min(k, len(self.ids))
        at_once = _SCORES // max(1, (wanted + _SPARE) * self.vectors.shape[1])
        at_once = max(1, min(_QUERIES, at_once))
        found = [
            self._best(users[begin : begin + at_once], wanted)
            for begin in range(0, len(users), at_once)
        ]
        return Best(*map(np.concatenate, zip(*found, strict=True)))

    def _best(self, users: Floats, wanted: int) -> Best:
        candidates = min(wanted + _SPARE, len(self.ids))
        begin = min(max(candidates, _LEAST), len(self.ids))
        found = users @ self.vectors[:begin].T
        best = _at_columns(found, _largest(found, candidates)).first(candidates)
        block = max(_LEAST, min(_MOST, _SCORES // len(users)))
        while begin < len(self.ids):
            found = users @ self.vectors[begin : begin + block].T
            better = _better(found, best.scores[:, -1:], candidates)
            at = np.where(better.at < 0, better.at, better.at + begin)
            best = _Positions(
                np.concatenate([best.at, at], 1), np.concatenate([best.scores, better.scores], 1)
            ).first(candidates)
            begin += block
        # Products of a matrix depend in their last bits on its shape: a user's must not on other users.
        exact = np.einsum(
            "qkw,qw->qk", self.vectors[best.at].astype(np.float64), users.astype(np.float64)
        )
        best = _Positions(best.at, exact.astype(np.float32)).first(wanted)
        return Best(self.ids[best.at], best.scores)


class _Positions(NamedTuple):
    at: Ints
    """(Q, n) positions of items."""
    scores: Floats
    """(Q, n)."""

    def first(self, count: int) -> _Positions:
        """Return the `count` with the largest scores, in order; of equal ones the lower positions first."""
        order = np.lexsort((self.at, -self.scores), axis=1)[:, :count]
        return _Positions(
            np.take_along_axis(self.at, order, 1), np.take_along_axis(self.scores, order, 1)
        )


def _at_columns(scores: Floats, columns: Ints) -> _Positions:
    return _Positions(columns, np.take_along_axis(scores, columns, 1))


def _better(scores: Floats, least: Floats, most: int) -> _Positions:
    """Return which of (Q, n) scores are above those of (Q, 1), at most `most` of each row; -1 and -inf where
    a row has fewer than another."""
    rows, columns = np.nonzero(scores > least)  # few, behind the first blocks
    counts = np.bincount(rows, minlength=len(scores))
    longest = int(counts.max(initial=0))
    if longest > most:
        return _at_columns(scores, _largest(scores, min(most, scores.shape[1])))
    at = np.full((len(scores), longest), -1, np.int64)
    above = np.full((len(scores), longest), -np.inf, np.float32)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    at[rows, within], above[rows, within] = columns, scores[rows, columns]
    return _Positions(at, above)


def _largest(scores: Floats, count: int) -> Ints:
    """Return the (Q, count) columns of the largest of (Q, n) scores, the first of those that are equal."""
    if count == scores.shape[1]:
        return np.broadcast_to(np.arange(count), scores.shape)
    columns: Ints = np.argpartition(scores, -count, axis=1)[:, -count:]
    chosen = np.take_along_axis(scores, columns, 1)
    least = chosen.min(axis=1, keepdims=True)
    equal, taken = (scores == least).sum(1), (chosen == least).sum(1)
    for row in np.flatnonzero(equal > taken):  # any of the equal ones were taken
        above = np.flatnonzero(scores[row] > least[row])
        first = np.flatnonzero(scores[row] == least[row])[: count - len(above)]
        columns[row] = np.concatenate([above, first])
    return columns
