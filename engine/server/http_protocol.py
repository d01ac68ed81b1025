"""uvicorn's HTTP/1.1 protocol with a bound on the head of a request, and its own errors as JSON.

httptools takes headers without end and uvicorn keeps them all; and uvicorn waits for ever for a client that connects
and sends no request, or half of one.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atom.engine.server.api_errors import ApiError

MAX_HEAD_BYTES: Final = 64 << 10
"""Target and headers of one request."""
READ_BYTES: Final = 256 << 10
"""What one read may bring of a body that follows its head at once."""
HEAD_TIMEOUT_S: Final = 60.0
"""From the connection, or a request's first byte, to the end of its head."""
MAX_CONNECTIONS: Final = 16_384
"""More than one event loop serves well; bounds what idle connections hold."""


class _HeadTooLarge(Exception):
    pass


class BoundedHttpProtocol(HttpToolsProtocol):
    """Raising in a parser callback ends the request: httptools reports it, and uvicorn answers `send_400_response`."""

    _head_bytes = 0
    _unparsed = 0
    """Bytes that came since the last whole head, while the next one is awaited."""
    _head_too_large = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(ApiError(503, f"{MAX_CONNECTIONS} connections are open already; try again later"))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # A header is counted when it is whole; httptools keeps one that never ends, and copies it for every read.
        if self._head_timer is not None:
            self._unparsed += len(data)
            if self._unparsed > MAX_HEAD_BYTES + READ_BYTES:
                self._head_too_large = True
                self.send_400_response("")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_arrived(self) -> None:
        self._unparsed = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse(ApiError(408, f"no whole request came within {HEAD_TIMEOUT_S:g} s"))

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._head_too_large = True
            raise _HeadTooLarge

    def send_400_response(self, msg: str) -> None:
        if self._head_too_large:
            error = ApiError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")
        else:
            error = ApiError(400, f"this is no HTTP request: {msg.rstrip('.').lower()}")
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Answer outside of any request, and close."""
        body = error.json()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()
