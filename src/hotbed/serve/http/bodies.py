"""Bodies of requests: read within limits, and as JSON."""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import cast

import orjson
from starlette.requests import ClientDisconnect, Request

from hotbed.files import Json
from hotbed.serve.http.errors import RequestError, busy
from hotbed.serve.http.limits import Limits

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["json_of", "read_body"]

GZIP = 16 + zlib.MAX_WBITS


async def json_of(request: Request, limits: Limits, empty: Json | None = None) -> Json:
    """Return the body of a request, which is JSON; or `empty` where there is no body.

    Raises:
        RequestError: it is not, too large, or does not come in time.
    """
    body = await read_body(request, limits)
    if not body and empty is not None:
        return empty
    try:
        return cast(Json, orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"The body is no JSON: {error}.") from None


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body of a request, uncompressed.

    Raises:
        RequestError: it is too large, or does not come in time, or is compressed otherwise than by gzip; or
            there are too many others.
    """
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdecimal() and int(told) > limits.body:
        raise _too_large(limits)
    try:
        async with timeout(limits.seconds):
            body = await _received(request, limits)
    except asyncio.TimeoutError:
        raise RequestError(408, f"The body has not come in {limits.seconds:g} s.") from None
    except ClientDisconnect:
        raise RequestError(400, "The body has ended before its end.") from None
    if not body and "upgrade" in request.headers:
        raise RequestError(
            400, "A request with a body cannot ask for an upgrade. Ask with HTTP/1.1."
        )
    how = request.headers.get("content-encoding", "identity").strip().lower()
    if how == "identity":
        return body
    if how != "gzip":
        raise RequestError(415, "The body is compressed otherwise than by gzip.")
    return _expanded(body, limits)


class _Held:
    """Bytes of bodies that this process is reading."""

    size = 0


async def _received(request: Request, limits: Limits) -> bytes:
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            _Held.size += len(piece)
            if size > limits.body:
                raise _too_large(limits)
            if _Held.size > max(limits.bodies, limits.body):
                raise busy("The server reads too many large bodies. Come again.", 1)
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        _Held.size -= size


def _expanded(body: bytes, limits: Limits) -> bytes:
    stream = zlib.decompressobj(GZIP)
    try:
        found = stream.decompress(body, limits.body + 1)
    except zlib.error as error:
        raise RequestError(400, f"The body is no gzip: {error}.") from None
    if len(found) > limits.body:
        raise _too_large(limits)
    if not stream.eof:
        raise RequestError(400, "The body is no gzip: its end is missing.")
    return found


def _too_large(limits: Limits) -> RequestError:
    return RequestError(413, f"The body is larger than {limits.body:,} bytes.")
