"""uvicorn's HTTP/1.1 protocol with a bound on the head of a request, and its own errors as JSON.

httptools takes headers without end and uvicorn keeps them all.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atom.engine.server.api_errors import ApiError

MAX_HEAD_BYTES: Final = 64 << 10
"""Target and headers of one request."""


class _HeadTooLarge(Exception):
    pass


class BoundedHttpProtocol(HttpToolsProtocol):
    """Raising in a parser callback ends the request: httptools reports it, and uvicorn answers `send_400_response`."""

    _head_bytes = 0
    _head_too_large = False

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

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
        body = error.json()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()
