"""The interface of models that answer samples, and their lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotbed.serve.bundles.bundle import LookupEntry
from hotbed.serve.bundles.reading import BundleTable, Ids, ReadTable, looked_up
from hotbed.serve.bundles.versions import Version
from hotbed.serve.http.parts import Input, Part

__all__ = ["Answering", "Answers", "Lookups"]

Answers = dict[str, NDArray[np.generic]]
"""Outputs by name, (B, ...) each."""


class Answering(Protocol):
    """Something that answers samples, those of several requests at once."""

    at: Version
    inputs: Mapping[str, Input]
    lookups: list[LookupEntry]
    tables: Mapping[str, BundleTable]
    """Its own, from which others get rows."""

    def answers(self, asked: Mapping[str, Part], tables: Mapping[str, ReadTable]) -> Answers: ...


class Lookups:
    """Lookups of a model.

    Args:
        entries: what the bundle says of them.
        inputs: of the model, by name.
    """

    def __init__(self, entries: Sequence[LookupEntry], inputs: Mapping[str, Input]) -> None:
        self._vectors = [each["vectors"] for each in entries]
        self._each = [
            (
                each["input"],
                inputs[each["input"]].bags,
                each["table"],
                (each["combiner"], each["padding_idx"], each["dtype"]),
            )
            for each in entries
        ]

    def vectors(self, tables: Mapping[str, ReadTable], asked: Mapping[str, Part]) -> Answers:
        """Return the vectors of some samples, by the names that the dense part has for them."""
        wanted = []
        for name, bags, table, how in self._each:
            part = asked[name]
            ids, offsets = bags(part)
            if how[0] == "none":
                wanted.append(Ids(tables[table], ids.reshape(part.values.shape), None, *how))
            else:
                wanted.append(Ids(tables[table], ids, offsets, *how))
        return dict(zip(self._vectors, looked_up(wanted), strict=True))
