"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hotbed.serve.http.errors import RequestError
from hotbed.serve.http.gate import Gate
from hotbed.serve.http.paths import Paths, json_response
from hotbed.serve.http.repository import routes_of
from hotbed.serve.http.server import Server
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.http.worker import settled

__all__ = ["app_of", "from_environment"]

CLOSED = (408, 413)
"""Statuses behind which the rest of a body is not awaited."""
_log = logging.getLogger("uvicorn.error")


def from_environment() -> Gate:
    """Return the application of the settings that the environment has, in a process of its own."""
    return settled(app_of(ServeSettings.from_environment()))


def app_of(settings: ServeSettings) -> Gate:
    """Return the application that serves a bundle.

    Raises:
        BundleError, OSError: as of `hotbed.serve.http.server.Server`.
    """
    server = Server(settings)
    paths = Paths(server)
    get, post = ["GET"], ["POST"]
    routes = [
        Route("/", paths.page, methods=get),
        Route("/sample", paths.sample, methods=get),
        Route("/openapi.json", paths.openapi, methods=get),
        Route("/metrics", paths.metrics, methods=get),
        Route("/healthz", paths.live, methods=get),
        Route("/readyz", paths.ready, methods=get),
        Route("/v2", paths.v2_server, methods=get),
        Route("/v2/health/live", paths.live, methods=get),
        Route("/v2/health/ready", paths.ready, methods=get),
    ]
    for of_version in ("/versions/{version}", ""):
        v1 = "/v1/models/{name}" + of_version
        v2 = "/v2/models/{name}" + of_version
        routes += [
            Route(f"{v1}:predict", paths.predict, methods=post),
            Route(f"{v1}:topk", paths.topk, methods=post),
            Route(f"{v1}/metadata", paths.v1_metadata, methods=get),
            Route(v1, paths.v1_status, methods=get),
            Route(f"{v2}/infer", paths.infer, methods=post),
            Route(f"{v2}/ready", paths.v2_ready, methods=get),
            Route(v2, paths.v2_metadata, methods=get),
        ]

    @contextlib.asynccontextmanager
    async def watching(app: Starlette) -> AsyncIterator[None]:
        await server.begin()
        task = asyncio.create_task(server.watch())
        yield
        task.cancel()
        await server.end()

    app = Starlette(
        routes=[*routes, *routes_of(server)],
        lifespan=watching,
        exception_handlers={RequestError: _refused, HTTPException: _not_found, Exception: _broken},
    )
    app.router.redirect_slashes = False
    return Gate(app, server.tokens, server.metrics)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status in CLOSED:
        headers["connection"] = "close"
    return json_response({"error": str(error)}, error.status, headers)


def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {404: "There is nothing at this path. / tells what there is."}
    text = told.get(error.status_code, error.detail)
    return json_response({"error": text}, error.status_code, dict(error.headers or {}))


def _broken(request: Request, error: Exception) -> Response:
    _log.error("A request could not be answered.", exc_info=error)
    return json_response({"error": "The server could not answer. Its log says why."}, 500)
