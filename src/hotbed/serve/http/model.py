"""A version of a bundle that is served."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hotbed.serve.bundle import DENSE
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.parts import Part, inputs_of_bundle
from hotbed.serve.opening import read_bundle
from hotbed.serve.reading import BundleTable, MappedRows, vectors_of
from hotbed.serve.sessions import session_of

__all__ = ["Answers", "ServedModel"]

Answers = dict[str, NDArray[np.generic]]
"""Outputs by name, (B, ...) each."""


class ServedModel:
    """A version of a bundle: its rows, mapped into memory, and its dense part.

    Args:
        folder: of the bundle.
        threads: that compute the dense part of one batch.

    Raises:
        BundleError, OSError: it cannot be read.
    """

    def __init__(self, folder: str, limits: Limits, threads: int = 1) -> None:
        self.about = read_bundle(folder)
        self.version = self.about["model_version"]
        self.inputs = inputs_of_bundle(self.about, limits)
        self.tables = {
            name: BundleTable([MappedRows(folder, each)])
            for name, each in self.about["tables"].items()
        }
        self._outputs = [each["name"] for each in self.about["outputs"]]
        self._dense = session_of(os.path.join(folder, DENSE), threads)

    def answers(self, asked: Mapping[str, Part]) -> Answers:
        """Return the outputs of some samples, which are as the signature says. Several threads may ask."""
        fed = {
            name: asked[name].values for name, each in self.inputs.items() if each.about["dense"]
        }
        for lookup in self.about["lookups"]:
            part, table = asked[lookup["input"]], self.tables[lookup["table"]]
            if lookup["combiner"] == "none":
                ids = part.values.astype(np.int64, copy=False)
                fed[lookup["vectors"]] = vectors_of(lookup, table, ids, None)
            else:
                bags = self.inputs[lookup["input"]].bags(part)
                fed[lookup["vectors"]] = vectors_of(lookup, table, *bags)
        return dict(zip(self._outputs, self._dense.run(self._outputs, fed), strict=True))
