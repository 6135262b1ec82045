"""A version of a bundle that is served."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping

import numpy as np

from hotbed.serve.bundles.bundle import SAMPLE, BundleError
from hotbed.serve.bundles.manifests import read_whole
from hotbed.serve.bundles.reading import ReadTable
from hotbed.serve.bundles.sessions import Session, session_of
from hotbed.serve.bundles.versions import Version, fault_of_sizes, open_layers
from hotbed.serve.http.answering import Answers, Lookups
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.parts import Input, Part, inputs_of_bundle, parts_of_lists
from hotbed.serve.http.records import records_of
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.http.topk import topk_of

__all__ = ["ServedModel"]

TOLERANCE = 1e-3
"""Between answers of the sample here and where it was exported, absolute and relative to the largest."""


class ServedModel:
    """A version of a bundle: its rows, mapped into memory, and its dense part.

    Raises:
        BundleError, OSError: it cannot be read, or answers the bundle's sample otherwise than that says.
    """

    def __init__(self, settings: ServeSettings, version: Version) -> None:
        folder = settings.bundle
        layers = open_layers(folder, version)
        if settings.memory is not None:
            for table in layers.tables.values():
                for rows in table.layers:
                    rows.expect_few_in_memory()
        self.at, self.version = version, version.model_version
        self.about = layers.about
        if fault := fault_of_sizes(folder, self.about["files"]):
            raise BundleError(f"{fault} Export the model again.")
        self.inputs: Mapping[str, Input] = inputs_of_bundle(self.about, settings.limits)
        self.records = records_of(self.about, self.inputs, settings.limits)
        self.lookups, self.tables = self.about["lookups"], layers.tables
        self._lookups = Lookups(self.lookups, self.inputs)
        self.topk = topk_of(layers, self.inputs, settings.threads)
        self._outputs = [each["name"] for each in self.about["outputs"]]
        self._dense = _session(folder, version, layers.dense, settings.threads)
        self.sample = json.loads(read_whole(folder, SAMPLE, self.about["files"]))
        self._warm_up(folder, settings.limits)

    def answers(self, asked: Mapping[str, Part], tables: Mapping[str, ReadTable]) -> Answers:
        """Return the outputs of some samples, which are as the signature says. Several threads may ask.

        Args:
            tables: the model's own, or others that have the rows of these samples.
        """
        fed = {
            name: asked[name].values for name, each in self.inputs.items() if each.about["dense"]
        }
        fed |= self._lookups.vectors(tables, asked)
        return dict(zip(self._outputs, self._dense.run(self._outputs, fed), strict=True))

    def _warm_up(self, folder: str, limits: Limits) -> None:
        """Answer the sample; the bundle as it was exported must answer what it says."""
        instances = self.sample["instances"]
        columns = {name: [each[name] for each in instances] for name in self.inputs}
        inputs = inputs_of_bundle(self.about, dataclasses.replace(limits, ids=sys.maxsize))
        parts = parts_of_lists(inputs, columns)
        found = self.answers(parts, self.tables)
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
