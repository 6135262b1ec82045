"""Connections that are closed when their requests do not come."""

from __future__ import annotations

import asyncio
import functools

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hotbed.serve.http.limits import Limits
from hotbed.serve.http.settings import ServeSettings

__all__ = ["Impatient"]

HEADERS = 1 << 16
"""Bytes that headers may have."""
READ = 1 << 18
"""Bytes that are read at once, of headers and of a body behind them."""


@functools.cache
def _limits() -> Limits:
    return ServeSettings.from_environment().limits


class Impatient(HttpToolsProtocol):
    """uvicorn's protocol of HTTP, which closes connections whose headers do not come in time, and those
    beyond what a worker may have."""

    _late: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _limits().connections:
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1")
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        if self._late is not None:  # headers are not complete
            self._header_bytes += len(data)
            if self._header_bytes > HEADERS + READ:
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _refuse(self, status: bytes) -> None:
        end = b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 " + status + end)
        self.transport.close()

    def _wait(self) -> None:
        self._cancel()
        self._header_bytes = 0
        self._late = self.loop.call_later(_limits().seconds, self.transport.close)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
