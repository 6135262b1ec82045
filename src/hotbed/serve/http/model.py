"""A version of a bundle that is served."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hotbed.serve.bundle import SAMPLE, BundleError
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.parts import Part, inputs_of_bundle
from hotbed.serve.manifests import read_whole
from hotbed.serve.reading import RequestedLookup, vectors_of_all
from hotbed.serve.sessions import Session, session_of
from hotbed.serve.versions import Version, fault_of_sizes, open_layers

__all__ = ["Answers", "ServedModel"]

Answers = dict[str, NDArray[np.generic]]
"""Outputs by name, (B, ...) each."""
TOLERANCE = 1e-3
"""Between answers of the sample here and where it was exported, absolute and relative to the largest."""


class ServedModel:
    """A version of a bundle: its rows, mapped into memory, and its dense part.

    Args:
        folder: of the bundle.
        threads: that compute the dense part of one batch.

    Raises:
        BundleError, OSError: it cannot be read, or answers the bundle's sample otherwise than that says.
    """

    def __init__(self, folder: str, version: Version, limits: Limits, threads: int = 1) -> None:
        layers = open_layers(folder, version)
        self.at, self.version = version, version.model_version
        self.about = layers.about
        if fault := fault_of_sizes(folder, self.about["files"]):
            raise BundleError(f"{fault} Export the model again.")
        self.inputs = inputs_of_bundle(self.about, limits)
        self._tables = layers.tables
        self._outputs = [each["name"] for each in self.about["outputs"]]
        self._dense = _session(folder, version, layers.dense, threads)
        self.sample = json.loads(read_whole(folder, SAMPLE, self.about["files"]))
        self._warm_up(folder, limits)

    def answers(self, asked: Mapping[str, Part]) -> Answers:
        """Return the outputs of some samples, which are as the signature says. Several threads may ask."""
        fed = {
            name: asked[name].values for name, each in self.inputs.items() if each.about["dense"]
        }
        lookups = []
        for lookup in self.about["lookups"]:
            part = asked[lookup["input"]]
            ids, offsets = self.inputs[lookup["input"]].bags(part)
            table = self._tables[lookup["table"]]
            if lookup["combiner"] == "none":
                ids = ids.reshape(part.values.shape)
                lookups.append(RequestedLookup(lookup, table, ids, None))
            else:
                lookups.append(RequestedLookup(lookup, table, ids, offsets))
        for each, vectors in zip(lookups, vectors_of_all(lookups), strict=True):
            fed[each.lookup["vectors"]] = vectors
        return dict(zip(self._outputs, self._dense.run(self._outputs, fed), strict=True))

    def _warm_up(self, folder: str, limits: Limits) -> None:
        """Answer the sample; the bundle as it was exported must answer what it says."""
        instances = self.sample["instances"]
        columns = {name: [each[name] for each in instances] for name in self.inputs}
        inputs = inputs_of_bundle(self.about, dataclasses.replace(limits, ids=sys.maxsize))
        found = self.answers({name: each.of_lists(columns[name]) for name, each in inputs.items()})
        for name, values in found.items() if not self.at.number else ():
            told = np.asarray([each[name] for each in self.sample["predictions"]], np.float64)
            most = max(1.0, float(np.abs(told).max(initial=0)))
            if not np.allclose(values, told, rtol=0, atol=TOLERANCE * most, equal_nan=True):
                raise BundleError(
                    f"{folder} answers {name!r} of its own sample otherwise than {SAMPLE} says. Export it "
                    "again."
                )


def _session(folder: str, version: Version, dense: bytes, threads: int) -> Session:
    try:
        return session_of(dense, threads)
    except ImportError:
        raise
    except Exception as error:  # onnxruntime's have no base of their own
        raise BundleError(
            f"The dense part of version {version.model_version} of {folder} is damaged: {error}"
        ) from error
