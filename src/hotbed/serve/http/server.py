"""State that all requests of a worker share: the version that is served, and its batchers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from hotbed.serve.bundles.bundle import BundleError
from hotbed.serve.bundles.versions import Version, current
from hotbed.serve.http.answering import Answering, Answers
from hotbed.serve.http.batching import Batcher
from hotbed.serve.http.errors import RequestError
from hotbed.serve.http.metrics import Metrics
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.parts import Part
from hotbed.serve.http.rows import MappedFiles, Rows, Shards
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.shards.addresses import Addresses
from hotbed.serve.shards.fetching import Fetcher

__all__ = ["Server"]

EVERY = 0.25
"""Seconds between two looks for another version."""
_log = logging.getLogger("uvicorn.error")


class Server:
    """A worker's: the version that is served, and what answers requests.

    Requests are answered by the version that was served when they came, of which they hold the rows.

    Raises:
        BundleError, OSError: the bundle cannot be read, or answers its sample otherwise than it says.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings, self.limits = settings, settings.limits
        self.metrics = Metrics()
        self._rows = _rows_of(settings)
        self.batcher = Batcher(self._rows, self.limits, self.metrics)
        self.searches = Batcher(self._rows, self.limits, self.metrics)
        """Apart, as a search of all items may take longer than many answers."""
        self.tokens = [token.encode("latin-1") for token in settings.tokens]
        self.model = self._opened(current(settings.bundle))
        self._told = ""
        self._turning = asyncio.Lock()

    async def end(self) -> None:
        """Give back what is held."""
        await self._rows.close()

    def check_name(self, name: str) -> None:
        """Raise RequestError unless the model has this name."""
        if name != self.settings.name:
            raise RequestError(
                404, f"There is no model of this name; {self.settings.name} is here."
            )

    def named(self, name: str, version: str | None) -> ServedModel:
        """Return the model that a request names. `version`: None for the one that is served.

        Raises:
            RequestError: it is not served.
        """
        self.check_name(name)
        model = self.model
        if version is not None and version != model.version:
            raise RequestError(404, f"This version is not served; {model.version} is.")
        return model

    def _opened(self, version: Version) -> ServedModel:
        model = ServedModel(self.settings, version)
        self.metrics.versions.inc()
        return model

    async def answers(self, model: Answering, parts: Mapping[str, Part], samples: int) -> Answers:
        """Return the outputs of some samples; see `Batcher.answers`.

        Raises:
            RequestError: there is too much to do, or they were not answered in time.
        """
        batcher = self.batcher if isinstance(model, ServedModel) else self.searches
        found = await batcher.answers(model, parts, samples)
        self.metrics.samples.inc(samples)
        return found

    async def watch(self) -> None:
        """Serve the version that is to be served, from when it is there, until cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                await self.refresh()
            except Exception as error:  # of whatever kind: the next version may be better
                if str(error) != self._told:
                    self._told = str(error)
                    known = isinstance(error, BundleError | OSError)
                    text = "%s Version %s is served on."
                    _log.error(text, error, self.model.version, exc_info=None if known else error)

    async def refresh(self) -> None:
        """Serve the version that is to be served now.

        Raises:
            BundleError, OSError: it cannot be read; the one before is served on.
        """
        async with self._turning:
            wanted = await asyncio.to_thread(current, self.settings.bundle)
            if wanted != self.model.at:
                self.model = await asyncio.to_thread(self._opened, wanted)
                self._told = ""


def _rows_of(settings: ServeSettings) -> Rows:
    """Return where rows are."""
    if settings.shards_file is None:
        return MappedFiles()
    token = settings.tokens[0] if settings.tokens else None
    return Shards(Fetcher(Addresses(settings.shards_file), settings.limits.seconds, token))
