"""The gate that each request passes: who may ask, and figures of how it went."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotbed.serve.http.metrics import Metrics
from hotbed.serve.http.paths import json_response
from hotbed.serve.http.tokens import is_known

__all__ = ["Gate"]

OPEN = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/")
"""Paths that need no token: they tell nothing of the model."""


class Gate:
    """An application behind it: tokens are asked for, and requests counted."""

    def __init__(self, app: ASGIApp, tokens: Sequence[bytes], metrics: Metrics) -> None:
        self._app, self._tokens, self._metrics = app, tokens, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app if self._may(scope) else _unknown
        try:
            await app(scope, receive, noted)
        finally:
            endpoint = _endpoint(scope["path"])
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.seconds.labels(endpoint).observe(time.perf_counter() - begun)

    def _may(self, scope: Scope) -> bool:
        if not self._tokens or scope["path"] in OPEN:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and is_known(given[0].decode("latin-1"), self._tokens)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"www-authenticate": "Bearer", "connection": "close"}
    told = {"error": "A token is needed: Authorization: Bearer TOKEN."}
    await json_response(told, 401, headers)(scope, receive, send)


def _endpoint(path: str) -> str:
    """Return what a request asked for, of few names."""
    for verb in ("predict", "topk"):
        if path.endswith(f":{verb}"):
            return verb
    return "infer" if path.endswith("/infer") else "other"
