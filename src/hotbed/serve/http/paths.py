"""Handlers of all paths."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from hotbed.files import Json
from hotbed.serve.http import open_inference, open_inference_json, tf_serving
from hotbed.serve.http.bodies import json_of
from hotbed.serve.http.errors import RequestError
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.metrics import CONTENT_TYPE_LATEST
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.openapi import openapi_of
from hotbed.serve.http.page import PAGE
from hotbed.serve.http.records import Records, are_records
from hotbed.serve.http.server import Server
from hotbed.serve.http.topk import NoItems, check_answer, k_of

__all__ = ["Paths", "json_response"]

VERSION = "x-model-version"
"""The header that says which version has answered."""


def json_response(
    contents: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return contents, which may have NumPy's arrays in them, as JSON."""
    body = orjson.dumps(contents, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers, "application/json")


class Paths:
    """Handlers of all paths."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)

    async def sample(self, request: Request) -> Response:
        return json_response(self._server.model.sample)

    async def openapi(self, request: Request) -> Response:
        return json_response(openapi_of(self._server.settings, self._server.model))

    async def metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self._server.metrics.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        return json_response({"ready": True})

    async def predict(self, request: Request) -> Response:
        model = self._model(request)
        self._server.batcher.check()
        body = await json_of(request, self._server.limits)
        asked = await _asked(body, model, self._server.limits)
        answers = await self._server.answers(model, asked.parts, asked.samples)
        return json_response(tf_serving.answered(answers, asked), headers=_told(model))

    async def topk(self, request: Request) -> Response:
        model = self._model(request)
        self._server.searches.check()
        body = await json_of(request, self._server.limits)
        if isinstance(model.topk, NoItems):
            raise RequestError(*model.topk)
        k, body = k_of(body, self._server.limits)
        asked = await _asked(body, model.topk, self._server.limits)
        check_answer(asked.samples, k, self._server.limits)
        answers = await self._server.answers(model.topk.best(k), asked.parts, asked.samples)
        return json_response(answers, headers=_told(model))

    async def v1_status(self, request: Request) -> Response:
        return json_response(tf_serving.told_status(self._model(request).version))

    async def v1_metadata(self, request: Request) -> Response:
        model = self._model(request)
        spec = {"name": self._server.settings.name, "version": model.version, "signature_name": ""}
        about: dict[str, object] = {
            key: model.about[key] for key in ("inputs", "lookups", "outputs", "tables")
        }
        if isinstance(model.records, Records):
            about["columns"] = model.records.columns.needed
        if not isinstance(model.topk, NoItems):
            about["topk"] = model.about["topk"]
        return json_response({"model_spec": spec, "metadata": about}, headers=_told(model))

    async def v2_server(self, request: Request) -> Response:
        return json_response(open_inference.server_metadata())

    async def v2_metadata(self, request: Request) -> Response:
        model = self._model(request)
        return json_response(open_inference.metadata_of(self._server.settings.name, model))

    async def v2_ready(self, request: Request) -> Response:
        model = self._model(request)
        return json_response(
            {"name": self._server.settings.name, "ready": True}, headers=_told(model)
        )

    async def infer(self, request: Request) -> Response:
        model = self._model(request)
        self._server.batcher.check()
        body = await json_of(request, self._server.limits)
        asked = open_inference_json.asked_of(body, model, self._server.limits)
        answers = await self._server.answers(model, asked.parts, asked.samples)
        name = self._server.settings.name
        told = open_inference_json.answered(answers, asked, name, model.version)
        return json_response(told, headers=_told(model))

    def _model(self, request: Request) -> ServedModel:
        """Return the version that a path names, or the one that is served."""
        about = request.path_params
        return self._server.named(about["name"], about.get("version"))


async def _asked(body: Json, model: tf_serving.Asking, limits: Limits) -> tf_serving.Asked:
    """Return what a body asks with. Columns are encoded beside the event loop, which takes some time."""
    if are_records(body):
        return await asyncio.to_thread(tf_serving.asked_of, body, model, limits)
    return tf_serving.asked_of(body, model, limits)


def _told(model: ServedModel) -> dict[str, str]:
    return {VERSION: model.version}
