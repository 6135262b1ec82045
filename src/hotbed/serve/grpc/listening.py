"""A worker's gRPC, beside its HTTP in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from hotbed.serve.grpc.calls import handlers_of
from hotbed.serve.grpc.messages import SERVICE
from hotbed.serve.http.server import Server
from hotbed.serve.http.settings import ServeSettings

__all__ = ["answering"]

IDLE, AGE = 300.0, 600.0
"""Seconds after which a connection is closed that has no calls, and any; clients open another. So workers
that have begun later get some, and answers that nobody takes are given up."""
LOOK = 0.2
"""Seconds between two looks for calls that end before the server does."""
UNCOMPRESSED = 1
"""As a set of bits, of algorithms: messages are expanded before anybody looks at their size."""


@contextlib.asynccontextmanager
async def answering(server: Server, address: str) -> AsyncIterator[None]:
    """For an ``async with`` statement: calls are answered at an address; those that it has, to their end.

    Raises:
        OSError: the certificate or its key cannot be read.
        RuntimeError: the address cannot be listened at.
    """
    limits = server.limits
    options = {
        "grpc.so_reuseport": 1,
        "grpc.max_receive_message_length": limits.body,
        "grpc.max_send_message_length": -1,
        "grpc.compression_enabled_algorithms_bitset": UNCOMPRESSED,
        "grpc.max_allowed_incoming_connections": limits.connections,
        "grpc.server_handshake_timeout_ms": round(1000 * limits.seconds),
        "grpc.max_connection_idle_ms": round(1000 * IDLE),
        "grpc.max_connection_age_ms": round(1000 * AGE),
        "grpc.max_connection_age_grace_ms": round(2000 * limits.seconds),
        "grpc.http2.bdp_probe": 0,  # or clients may send megabytes unasked
    }
    listener = grpc.aio.server(
        options=[*options.items()], maximum_concurrent_rpcs=limits.connections
    )
    in_flight: set[object] = set()
    service = grpc.method_handlers_generic_handler(SERVICE, handlers_of(server, in_flight))
    listener.add_generic_rpc_handlers((service,))
    _listen(listener, address, server.settings)
    await listener.start()
    try:
        yield
    finally:
        await _end(listener, 2 * limits.seconds, in_flight)


async def _end(listener: grpc.aio.Server, seconds: float, in_flight: set[object]) -> None:
    """Take no more calls, and end when those in flight are answered, in some seconds at most.

    Connections without any are closed: gRPC would wait for their clients to do so.
    """
    ending = asyncio.create_task(listener.stop(seconds))
    while not (await asyncio.wait({ending}, timeout=LOOK))[0]:
        if not in_flight:
            await listener.stop(None)
    await ending


def _listen(listener: grpc.aio.Server, address: str, settings: ServeSettings) -> None:
    if settings.certificate is None:
        listener.add_insecure_port(address)
        return
    certificate = Path(settings.certificate).read_bytes()
    key = certificate if settings.key is None else Path(settings.key).read_bytes()
    listener.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
