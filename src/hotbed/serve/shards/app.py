"""The ASGI application of a shard: rows of ids."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from hotbed.errors import IdError
from hotbed.serve.bundles.bundle import BundleError
from hotbed.serve.bundles.versions import Layers, current, open_layers, versions_of
from hotbed.serve.http.bodies import read_body
from hotbed.serve.http.errors import RequestError
from hotbed.serve.http.gate import Gate
from hotbed.serve.http.metrics import CONTENT_TYPE_LATEST, Metrics
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.http.worker import settled
from hotbed.serve.shards.messages import Wanted, read_wanted, rows_message

__all__ = ["from_environment"]

OPEN = 3
"""Versions whose files stay mapped."""


def from_environment() -> Gate:
    """Return the application of the settings that the environment has, in a process of its own."""
    settings = ServeSettings.from_environment()
    shard = _Shard(settings)
    metrics = Metrics()

    async def figures(request: Request) -> Response:
        return Response(await asyncio.to_thread(metrics.text), media_type=CONTENT_TYPE_LATEST)

    @contextlib.asynccontextmanager
    async def opened(app: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(shard.layers, current(settings.bundle).model_version)
        yield

    app = Starlette(
        routes=[
            Route("/rows", shard.rows, methods=["POST"]),
            Route("/healthz", shard.live, methods=["GET"]),
            Route("/readyz", shard.live, methods=["GET"]),
            Route("/metrics", figures, methods=["GET"]),
        ],
        lifespan=opened,
        exception_handlers={RequestError: _refused, HTTPException: _refused},
    )
    return settled(Gate(app, [token.encode("latin-1") for token in settings.tokens], metrics))


class _Shard:
    """Rows of a bundle, of whichever of its versions are asked for."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        # Ids take more bytes here than in the JSON of which they come.
        self._limits = dataclasses.replace(settings.limits, body=8 * settings.limits.body)
        self._opening = threading.Lock()
        self._open: collections.OrderedDict[str, Layers] = collections.OrderedDict()

    async def live(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def rows(self, request: Request) -> Response:
        """Answer ids with rows."""
        body = await read_body(request, self._limits)
        try:
            wanted = read_wanted(body)
            found = await asyncio.to_thread(self._rows, wanted)
        except BundleError as error:
            raise RequestError(404, str(error)) from None
        except (ValueError, IdError) as error:
            raise RequestError(400, str(error)) from None
        return Response(rows_message(found), media_type="application/octet-stream")

    def _rows(self, wanted: Wanted) -> list[NDArray[np.float32]]:
        tables = self.layers(wanted.version).tables
        if unknown := wanted.ids.keys() - tables.keys():
            raise ValueError(f"There is no table {min(unknown)!r}.")
        return [tables[name].rows(ids) for name, ids in wanted.ids.items()]

    def layers(self, version: str) -> Layers:
        """Return the rows of a version.

        Raises:
            BundleError: it is not here.
        """
        with self._opening:
            if version not in self._open:
                self._open[version] = self._opened(version)
                while len(self._open) > OPEN:
                    self._open.popitem(last=False)
            return self._open[version]

    def _opened(self, version: str) -> Layers:
        bundle = self._settings.bundle
        for each in reversed(versions_of(bundle)):
            if each.model_version == version:
                return open_layers(bundle, each)
        raise BundleError(f"{bundle} has no version {version!r}.")


def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    if isinstance(error, RequestError):
        status = error.status
    return PlainTextResponse(str(error), status)
