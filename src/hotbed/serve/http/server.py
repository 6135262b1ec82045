"""What all requests of a worker share: the version that is served, and what answers them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping

import numpy as np

from hotbed.serve.bundle import SAMPLE, BundleError
from hotbed.serve.http.batching import Batcher
from hotbed.serve.http.metrics import Metrics
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.parts import Part
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.http.tf_serving import asked_of

__all__ = ["Server"]

TOLERANCE = 1e-3
"""Between answers of the sample here and where it was exported, absolute and relative to the largest."""


class Server:
    """A worker's: the version that is served, and what answers requests.

    Raises:
        BundleError, OSError: the bundle cannot be read, or answers its sample otherwise than it says.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings, self.limits = settings, settings.limits
        self.metrics = Metrics()
        self.batcher = Batcher(settings.limits, self.metrics)
        self.tokens = [token.encode("latin-1") for token in settings.tokens]
        self.model = self._opened(settings.bundle)

    def _opened(self, folder: str) -> ServedModel:
        model = ServedModel(folder, self.limits, self.settings.threads)
        with open(os.path.join(folder, SAMPLE), encoding="utf-8") as file:
            self.sample = json.load(file)
        asked = asked_of({"instances": self.sample["instances"]}, model, self.limits)
        found = model.answers(asked.parts)
        _check(folder, found, self.sample["predictions"])
        self.metrics.versions.inc()
        return model

    async def answers(
        self, model: ServedModel, parts: Mapping[str, Part], samples: int
    ) -> dict[str, np.ndarray]:
        """Return the outputs of some samples; see `Batcher.answers`."""
        found = await asyncio.wait_for(
            self.batcher.answers(model, parts, samples), 2 * self.limits.seconds
        )
        self.metrics.samples.inc(samples)
        return found


def _check(folder: str, found: Mapping[str, np.ndarray], told: object) -> None:
    assert isinstance(told, list)
    for name, values in found.items():
        expected = np.asarray([each[name] for each in told], np.float64)
        most = max(1.0, float(np.abs(expected).max(initial=0)))
        if not np.allclose(values, expected, rtol=0, atol=TOLERANCE * most):
            raise BundleError(
                f"{folder} answers {name!r} of its own sample otherwise than {SAMPLE} says. Export it again."
            )
