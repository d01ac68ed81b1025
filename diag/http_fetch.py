"""Timed GETs, bounded in time and bytes whatever the server does: on a connection that is kept (`Connection`), or on
one of its own (`fetch`).

Written on sockets so that every wait ends at one deadline, and so that no proxy of the environment comes between: a
server is measured, not what stands before it.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

__all__ = ["Answer", "Connection", "Exchange", "Response", "ScrapeError", "describe_failure", "fetch"]

TIMEOUT_S: Final = 10.0
MAX_BODY_BYTES: Final = 64 << 20

FAILURES: Final = (OSError, http.client.HTTPException, ValueError)
"""What a GET can raise."""


class ScrapeError(Exception):
    """No usable answer; the message says why in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes
    reusable: bool
    """Whether the connection can carry another request."""


class Connection:
    """An open connection whose reads end at a deadline: a server that drips a byte a second does not stretch a GET.

    Deadlines are of `time.monotonic`; TimeoutError when one has passed.
    """

    def __init__(self, url: SplitResult, deadline: float) -> None:
        host, tls = url.hostname or "", url.scheme == "https"
        port = url.port or (443 if tls else 80)
        self._socket: socket.socket = socket.create_connection((host, port), timeout=_left(deadline))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            try:
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
            except BaseException:
                self._socket.close()
                raise
        path = f"{url.path or '/'}{'?' + url.query if url.query else ''}"
        name = f"[{host}]" if ":" in host else host
        self._head = f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\n"

    def get(self, deadline: float, *, headers: str = "Accept: */*\r\n", max_bytes: int = MAX_BODY_BYTES) -> Answer:
        """One GET of the URL, its body read to the end; HTTPException if that is longer than `max_bytes`."""
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(f"{self._head}{headers}\r\n".encode("ascii"))
        reader = _Reader(self._socket, deadline)
        response = http.client.HTTPResponse(reader, method="GET")  # type: ignore[arg-type]
        try:
            response.begin()
            body = response.read(max_bytes + 1)
            if len(body) > max_bytes:
                raise http.client.HTTPException(f"body larger than {max_bytes} bytes")
            if response.length:
                raise http.client.IncompleteRead(body, response.length)
            return Answer(status=response.status, headers=response.headers, body=body, reusable=not response.will_close)
        finally:
            response.close()

    def shut(self) -> None:
        """End what is under way on it, from another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


class _Reader(io.RawIOBase):
    """What `HTTPResponse` takes for a socket: it makes a file of it, which is this."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__()
        self._socket = sock
        self._deadline = deadline

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(_left(self._deadline))
        return self._socket.recv_into(buffer)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def describe_failure(error: Exception, timeout_s: float) -> str:
    """One of `FAILURES` in a few words."""
    if isinstance(error, TimeoutError):
        return f"no complete answer within {timeout_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return f"{type(error).__name__}: {error}"[:200]


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    sent_ns: int
    """Just before the request's first byte was sent; the connection was open by then."""
    latency_ns: int
    """First byte sent to last byte read."""
    connect_ns: int
    status: int
    body: bytes
    encoding: str
    """Content-Encoding, which nobody asked for; "" if there is none."""
    location: str | None


@dataclass(slots=True)
class Exchange:
    """An exchange under way, and whether it was cut from outside."""

    connection: Connection | None = None
    cut_because: str | None = None

    def cut(self, why: str) -> None:
        self.cut_because = why
        if self.connection is not None:
            self.connection.shut()


def fetch(
    url: str, *, timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_BODY_BYTES, exchange: Exchange | None = None
) -> Response:
    """One GET on a connection of its own, timed; ScrapeError if it fails, takes longer or is larger than allowed.

    `timeout_s` bounds the whole exchange.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    exchange = exchange or Exchange()
    begun = time.monotonic_ns()
    deadline = begun / 1e9 + timeout_s
    try:
        exchange.connection = Connection(parts, deadline)
        sent = time.monotonic_ns()
        answer = exchange.connection.get(
            deadline, headers="Accept: text/plain\r\nConnection: close\r\n", max_bytes=max_bytes
        )
        ended = time.monotonic_ns()
    except FAILURES as error:
        raise ScrapeError(exchange.cut_because or describe_failure(error, timeout_s)) from None
    finally:
        if exchange.connection is not None:
            exchange.connection.close()
    if exchange.cut_because:
        raise ScrapeError(exchange.cut_because)
    encoding = answer.headers.get("Content-Encoding", "").strip().lower()
    return Response(
        sent_ns=sent,
        latency_ns=ended - sent,
        connect_ns=sent - begun,
        status=answer.status,
        body=answer.body,
        encoding="" if encoding == "identity" else encoding[:40],
        location=answer.headers.get("Location"),
    )
