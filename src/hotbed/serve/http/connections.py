"""Connections that are closed when their requests do not come, or their answers are not taken."""

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
    """uvicorn's protocol of HTTP, which closes connections whose headers do not come in time, those whose
    answers are not taken in time, and those beyond what a worker may have."""

    _late: asyncio.TimerHandle | None = None
    """Closes the connection when headers do not come."""
    _untaken: asyncio.TimerHandle | None = None
    """Closes it when the client does not take what was answered."""
    _header_bytes: int | None = None
    """How many have come; None: no headers are awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _limits().connections:
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1")
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            self._header_bytes += len(data)
            if self._header_bytes > HEADERS + READ:
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().data_received(data)
        if self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._late = self._aborts_late()  # empty lines, or a body that nobody awaits

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._cancel()
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser takes the body for another request

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self._aborts_late()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # to close it would wait until all is taken
            self.timeout_keep_alive_task = self._aborts_late()
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self._taken()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: whoever asks can have as many lines written as they like."""

    def _refuse(self, status: bytes) -> None:
        end = b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 " + status + end)
        self.transport.close()

    def _wait(self) -> None:
        self._cancel()
        self._header_bytes = 0
        self._late = self._aborts_late()

    def _aborts_late(self) -> asyncio.TimerHandle:
        return self.loop.call_later(_limits().seconds, self.transport.abort)

    def _cancel(self) -> None:
        self._header_bytes = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _taken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None
