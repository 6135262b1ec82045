"""The interface of models that answer samples, and their lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotbed.serve.bundles.bundle import LookupEntry
from hotbed.serve.bundles.reading import BundleTable, Ids, ReadTable
from hotbed.serve.bundles.reading import looked_up as read_vectors
from hotbed.serve.bundles.versions import Version
from hotbed.serve.http.parts import Input, Part

__all__ = ["Answering", "Answers", "looked_up"]

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


def looked_up(
    lookups: Sequence[LookupEntry],
    inputs: Mapping[str, Input],
    tables: Mapping[str, ReadTable],
    asked: Mapping[str, Part],
) -> Answers:
    """Return the vectors of some samples, by the names that the dense part has for them."""
    requested = []
    for lookup in lookups:
        part = asked[lookup["input"]]
        ids, ends = inputs[lookup["input"]].bags(part)
        offsets: NDArray[np.int64] | None = ends
        if lookup["combiner"] == "none":
            ids, offsets = ids.reshape(part.values.shape), None
        requested.append(Ids.of(lookup, tables[lookup["table"]], ids, offsets))
    names = [lookup["vectors"] for lookup in lookups]
    return dict(zip(names, read_vectors(requested), strict=True))
