"""The best items of all for a user: ``/v1/models/NAME:topk``, of two-tower models."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hotbed.files import Json
from hotbed.serve.bundles.bundle import USER_VECTOR, TopKEntry
from hotbed.serve.bundles.reading import ReadTable
from hotbed.serve.bundles.sessions import session_of
from hotbed.serve.bundles.versions import Layers, ServedItems
from hotbed.serve.http.answering import Answering, Answers, Lookups
from hotbed.serve.http.errors import RequestError, wrong
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.parts import Input, Part
from hotbed.serve.http.records import records_of

__all__ = ["NoItems", "TopK", "check_answer", "k_of", "topk_of"]

K = 10
"""Items that are answered where a request names no number."""
_NONE = (
    "The bundle has no vectors of items: it is of no TwoTower, or its items have more than an id and "
    "hotbed.export was given none (items=)."
)


class NoItems(NamedTuple):
    """In place of `TopK`: why there is none."""

    status: int
    why: str


class TopK:
    """Items of a version, and what a user is asked with. Several threads may ask."""

    def __init__(
        self,
        layers: Layers,
        items: ServedItems,
        about: TopKEntry,
        every: Mapping[str, Input],
        threads: int,
    ) -> None:
        self.inputs: Mapping[str, Input] = {name: every[name] for name in about["inputs"]}
        limits = self.inputs[about["inputs"][0]].limits
        self.records = records_of(layers.about, self.inputs, limits)
        self.lookups = [each for each in layers.about["lookups"] if each["input"] in self.inputs]
        self._lookups = Lookups(self.lookups, self.inputs)
        self.at, self.tables = layers.version, layers.tables
        self._items = items.vectors
        self._users = session_of(items.users, threads)
        self._taken = [each.name for each in self._users.get_inputs()]
        # Weak, so that vectors of earlier versions go at once, and not with the next collection.
        self._best = weakref.WeakValueDictionary[int, _Best]()

    def best(self, k: int) -> Answering:
        """Return what answers with `k` items; the same object while it is held, so requests are one batch."""
        return self._best.setdefault(k, _Best(self, k))

    def found(self, asked: Mapping[str, Part], tables: Mapping[str, ReadTable], k: int) -> Answers:
        """Return `k` items of each user, and their scores, the best first."""
        given = {name: part.values for name, part in asked.items()}
        given |= self._lookups.vectors(tables, asked)
        (users,) = self._users.run([USER_VECTOR], {name: given[name] for name in self._taken})
        best = self._items.search(users.astype(np.float32, copy=False), k)
        return {"items": best.ids, "scores": best.scores}


class _Best:
    def __init__(self, topk: TopK, k: int) -> None:
        self.at, self.inputs = topk.at, topk.inputs
        self.lookups, self.tables = topk.lookups, topk.tables
        self._topk, self._k = topk, k

    def answers(self, asked: Mapping[str, Part], tables: Mapping[str, ReadTable]) -> Answers:
        return self._topk.found(asked, tables, self._k)


def topk_of(layers: Layers, inputs: Mapping[str, Input], threads: int) -> TopK | NoItems:
    """Return the items of a version of a bundle, or why it has none."""
    about, version = layers.about.get("topk"), layers.version
    if about is None:
        return NoItems(400, _NONE)
    if layers.items is None:
        return NoItems(
            409,
            f"Version {version.model_version} has no vectors of items, as an earlier Hotbed has exported the "
            f"bundle, or made the version. Export the bundle again, or load version {version.base}.",
        )
    return TopK(layers, layers.items, about, inputs, threads)


def k_of(body: Json, limits: Limits) -> tuple[int, Json]:
    """Return how many items a request asks for, and its body without that.

    Raises:
        RequestError: it is no such number.
    """
    if not isinstance(body, dict):
        return K, body
    k = body.get("k", K)
    if type(k) is not int or not 1 <= k <= limits.k:
        raise wrong("k", f"is a whole number from 1 to {limits.k}.")
    return k, {name: value for name, value in body.items() if name != "k"}


def check_answer(samples: int, k: int, limits: Limits) -> None:
    """Raise RequestError where an answer has too many items."""
    if samples * k > limits.items:
        raise RequestError(
            413, f"{samples} samples of {k} items are asked, and {limits.items} items may be."
        )
