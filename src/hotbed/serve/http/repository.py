"""Versions as they are listed and chosen: ``/v2/repository``, as Triton has it."""

from __future__ import annotations

import asyncio
from typing import NoReturn, TypedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hotbed.serve.bundles.bundle import BundleError
from hotbed.serve.bundles.versions import pin, pinned, unpin, versions_of
from hotbed.serve.http.bodies import json_of
from hotbed.serve.http.errors import RequestError, wrong
from hotbed.serve.http.paths import json_response
from hotbed.serve.http.server import Server

__all__ = ["Listed", "Repository", "routes_of"]


class Listed(TypedDict):
    """A version, as it is listed."""

    name: str
    version: str
    state: str
    reason: str


class Repository:
    """The versions of a server's model."""

    def __init__(self, server: Server) -> None:
        self._server, self._bundle = server, server.settings.bundle

    async def index(self) -> list[Listed]:
        """Return all versions that are there, the newest last.

        Raises:
            RequestError: they cannot be read now.
        """
        try:
            there = await asyncio.to_thread(versions_of, self._bundle)
            fixed = await asyncio.to_thread(pinned, self._bundle)
        except (BundleError, OSError) as error:
            raise RequestError(503, f"{error} It is served on.", 1) from None
        served = self._server.model.version
        return [
            {
                "name": self._server.settings.name,
                "version": each.model_version,
                "state": "READY" if each.model_version == served else "UNAVAILABLE",
                "reason": "" if each.model_version != fixed else "It was asked for.",
            }
            for each in there
        ]

    async def load(self, name: str, version: str | None) -> str:
        """Serve a version from now on; `version`: None for the newest and those that come. Returns it.

        Raises:
            RequestError: there is no such version, or model.
        """
        self._server.check_name(name)
        try:
            if version is None:
                await asyncio.to_thread(unpin, self._bundle)
            else:
                await asyncio.to_thread(pin, self._bundle, version)
            await self._server.refresh()
        except BundleError as error:
            raise RequestError(400, str(error)) from None
        except OSError as error:
            raise RequestError(500, f"The version cannot be chosen: {error.strerror}.") from None
        return self._server.model.version

    def unload(self, name: str) -> NoReturn:
        """Raise RequestError: a server has one model."""
        self._server.check_name(name)
        raise RequestError(400, "The server has one model. End it, or load another version.")


def routes_of(server: Server) -> list[Route]:
    """Return the paths of a server's versions."""
    paths = _Paths(server)
    model = "/v2/repository/models/{name}"
    return [
        Route("/v2/repository/index", paths.index, methods=["POST"]),
        Route(f"{model}/load", paths.load, methods=["POST"]),
        Route(f"{model}/unload", paths.unload, methods=["POST"]),
    ]


class _Paths:
    def __init__(self, server: Server) -> None:
        self._server, self._repository = server, Repository(server)

    async def index(self, request: Request) -> Response:
        return json_response(await self._repository.index())

    async def load(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._server.check_name(name)
        body = await json_of(request, self._server.limits, empty={})
        parameters = body.get("parameters", {}) if isinstance(body, dict) else None
        if not isinstance(parameters, dict) or parameters.keys() - {"version"}:
            raise wrong("parameters", "is an object, with a version or nothing.")
        version = parameters.get("version")
        if version is not None and not isinstance(version, str):
            raise wrong("version", "is a string.")
        return json_response({"version": await self._repository.load(name, version)})

    async def unload(self, request: Request) -> Response:
        self._repository.unload(request.path_params["name"])
