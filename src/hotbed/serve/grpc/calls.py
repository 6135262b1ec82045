"""Calls as gRPC makes them: who may ask, limits, errors as statuses, and figures of how each went."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
from google.protobuf.message import DecodeError, Message

from hotbed.serve.grpc.service import Method, methods_of
from hotbed.serve.http.errors import RequestError
from hotbed.serve.http.server import Server
from hotbed.serve.http.tokens import is_known

__all__ = ["handlers_of"]

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""By statuses of HTTP; others are INTERNAL."""
RETRY = "grpc-retry-pushback-ms"
"""Trailing metadata: milliseconds after which clients that try again of themselves do so."""
TOLD = 1000
"""Characters of an error: clients take no more than some kilobytes of headers."""
_log = logging.getLogger("uvicorn.error")


def handlers_of(server: Server, in_flight: set[object]) -> dict[str, grpc.RpcMethodHandler]:
    """Return what answers each method, as gRPC calls it.

    `in_flight` has those calls whose answers are not sent yet.

    A call of one message is, on the wire, a stream of one: so it is taken here, which lets a call be refused
    before its message is read, and a message be awaited for as long as the limits say.
    """
    reading = asyncio.Semaphore(max(1, server.limits.bodies // server.limits.body))
    return {
        name: grpc.stream_unary_rpc_method_handler(
            _Calls(server, method, reading, in_flight).answer
        )
        for name, method in methods_of(server).items()
    }


class _Calls:
    """Calls of a method. `reading`: how many messages of all methods may be read at a time; others stay with
    their clients, but for what they may send unasked."""

    def __init__(
        self, server: Server, method: Method, reading: asyncio.Semaphore, in_flight: set[object]
    ) -> None:
        self._server, self._method, self._reading = server, method, reading
        self._in_flight = in_flight

    async def answer(self, messages: object, context: grpc.aio.ServicerContext) -> bytes:
        begun, code = time.perf_counter(), grpc.StatusCode.CANCELLED
        self._in_flight.add(context)
        context.add_done_callback(self._in_flight.discard)  # behind the answer, which may take long
        try:
            answer: bytes = (await self._answered(context)).SerializeToString()
            code = grpc.StatusCode.OK
            return answer
        except RequestError as error:
            code = CODES.get(error.status, grpc.StatusCode.INTERNAL)
            return await _refused(context, code, error)
        except Exception as error:
            code = grpc.StatusCode.INTERNAL
            _log.error("A request could not be answered.", exc_info=error)
            told = RequestError(500, "The server could not answer. Its log says why.")
            return await _refused(context, code, told)
        finally:
            endpoint, metrics = self._method.endpoint, self._server.metrics
            metrics.requests.labels(endpoint, code.name).inc()
            metrics.seconds.labels(endpoint).observe(time.perf_counter() - begun)

    async def _answered(self, context: grpc.aio.ServicerContext) -> Message:
        if self._server.tokens and not self._method.is_open:
            self._check_token(context)
        if self._method.is_work:
            self._server.batcher.check()
        request = self._method.request()
        try:
            request.ParseFromString(await self._received(context))
        except DecodeError:
            raise RequestError(400, "The message is none of this method.") from None
        return await self._method.answer(request)

    async def _received(self, context: grpc.aio.ServicerContext) -> bytes:
        seconds = self._server.limits.seconds
        try:
            message: bytes = await asyncio.wait_for(self._read(context), seconds)
        except asyncio.TimeoutError:
            raise RequestError(408, f"The message has not come in {seconds:g} s.") from None
        if message is grpc.aio.EOF:
            raise RequestError(400, "The call has ended without a message.")
        return message

    async def _read(self, context: grpc.aio.ServicerContext) -> bytes:
        async with self._reading:
            message: bytes = await context.read()
            return message

    def _check_token(self, context: grpc.aio.ServicerContext) -> None:
        given = [value for key, value in context.invocation_metadata() if key == "authorization"]
        is_text = len(given) == 1 and isinstance(given[0], str) and given[0].isascii()
        if not is_text or not is_known(given[0], self._server.tokens):
            raise RequestError(401, "A token is needed: authorization: Bearer TOKEN, as metadata.")


async def _refused(
    context: grpc.aio.ServicerContext, code: grpc.StatusCode, error: RequestError
) -> bytes:
    after = error.retry_after
    context.set_trailing_metadata(() if after is None else ((RETRY, str(1000 * after)),))
    context.set_code(code)
    context.set_details(str(error)[:TOLD])
    return b""
