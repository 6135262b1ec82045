"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hotbed.serve.bundles.bundle import BundleError
from hotbed.serve.http.errors import RequestError
from hotbed.serve.http.gate import Gate
from hotbed.serve.http.metrics import forget_folder
from hotbed.serve.http.paths import Paths, json_response
from hotbed.serve.http.repository import routes_of
from hotbed.serve.http.server import Server
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.http.worker import settled

__all__ = ["app_of", "from_environment"]

CLOSED = (408, 413)
"""Statuses behind which the rest of a body is not awaited."""
AGAIN = 2.0
"""Seconds after which a process that could not begin is followed by another."""
PARENT = 1.0
"""Seconds between two looks for the parent."""
_log = logging.getLogger("uvicorn.error")


def from_environment() -> Gate:
    """Return the application of the settings that the environment has, in a process of its own."""
    try:
        app = app_of(ServeSettings.from_environment())
    except (BundleError, OSError) as error:
        _log.error("%s A process that answers cannot begin; it is tried again.", error)
        time.sleep(AGAIN)
        raise SystemExit(1) from None
    return settled(app)


def app_of(settings: ServeSettings) -> Gate:
    """Return the application that serves a bundle.

    Raises:
        BundleError, OSError: as of `hotbed.serve.http.server.Server`.
    """
    server = Server(settings)
    paths = Paths(server)
    get, post = ["GET"], ["POST"]
    routes = []  # tried in this order
    for of_version in ("", "/versions/{version}"):
        v1 = "/v1/models/{name}" + of_version
        v2 = "/v2/models/{name}" + of_version
        routes += [
            Route(f"{v1}:predict", paths.predict, methods=post),
            Route(f"{v2}/infer", paths.infer, methods=post),
            Route(f"{v1}:topk", paths.topk, methods=post),
            Route(f"{v1}/metadata", paths.v1_metadata, methods=get),
            Route(v1, paths.v1_status, methods=get),
            Route(f"{v2}/ready", paths.v2_ready, methods=get),
            Route(v2, paths.v2_metadata, methods=get),
        ]
    routes += [
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

    @contextlib.asynccontextmanager
    async def watching(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(server.watch())]
        if settings.workers > 1:
            tasks.append(asyncio.create_task(_end_with_parent()))
        async with _grpc(server):
            yield
        for task in tasks:
            task.cancel()
        await server.end()
        if settings.workers > 1 and _is_orphan():
            forget_folder()

    app = Starlette(
        routes=[*routes, *routes_of(server)],
        lifespan=watching,
        exception_handlers={RequestError: _refused, HTTPException: _not_found, Exception: _broken},
    )
    app.router.redirect_slashes = False
    return Gate(app, server.tokens, server.metrics)


def _grpc(server: Server) -> contextlib.AbstractAsyncContextManager[None]:
    """For an ``async with`` statement: gRPC is answered, too, where the settings say so."""
    if server.settings.grpc is None:
        return contextlib.nullcontext()
    from hotbed.serve.grpc.listening import answering

    return answering(server, server.settings.grpc)


async def _end_with_parent() -> None:
    """End this process, in order, when the one that has begun it is gone: nobody else would."""
    while not _is_orphan():
        await asyncio.sleep(PARENT)
    forget_folder()
    signal.raise_signal(signal.SIGTERM)


def _is_orphan() -> bool:
    """Return whether the process that has begun this one is gone."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


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
