"""One timed GET on a connection of its own, bounded in time and bytes whatever the server does."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

__all__ = ["Exchange", "Response", "ScrapeError", "fetch"]

TIMEOUT_S: Final = 10.0
MAX_BODY_BYTES: Final = 64 << 20


class ScrapeError(Exception):
    """No usable answer; the message says why in a few words."""


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
    """The sockets of an exchange under way, and whether it was cut from outside."""

    sockets: list[socket.socket] = field(default_factory=list)
    cut_because: str | None = None

    def cut(self, why: str) -> None:
        self.cut_because = why
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def fetch(
    url: str, *, timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_BODY_BYTES, exchange: Exchange | None = None
) -> Response:
    """One GET on a connection of its own, timed; ScrapeError if it fails, takes longer or is larger than allowed.

    `timeout_s` bounds the whole exchange: a server that drips a byte a second does not stretch it.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    exchange = exchange or Exchange()
    late = f"no complete answer within {timeout_s:g} s"
    timer = threading.Timer(timeout_s, exchange.cut, [late])
    timer.daemon = True
    timer.start()
    try:
        begun = time.monotonic_ns()
        connection.connect()
        exchange.sockets.append(connection.sock)  # the connection forgets it once the response has it
        sent = time.monotonic_ns()
        connection.request("GET", parts.path or "/", headers={"Accept": "text/plain", "Connection": "close"})
        response = connection.getresponse()
        body = response.read(max_bytes + 1)
        ended = time.monotonic_ns()
        if response.length and len(body) <= max_bytes:
            raise http.client.IncompleteRead(body, response.length)
    except ConnectionRefusedError:
        raise ScrapeError("connection refused") from None
    except (TimeoutError, OSError, http.client.HTTPException, ssl.SSLError, ValueError) as error:
        if exchange.cut_because or isinstance(error, TimeoutError):
            raise ScrapeError(exchange.cut_because or late) from None
        raise ScrapeError(f"{type(error).__name__}: {error}"[:200]) from None
    finally:
        timer.cancel()
        connection.close()
    if exchange.cut_because:
        raise ScrapeError(exchange.cut_because)
    if len(body) > max_bytes:
        raise ScrapeError(f"body larger than {max_bytes} bytes")
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    return Response(
        sent_ns=sent,
        latency_ns=ended - sent,
        connect_ns=sent - begun,
        status=response.status,
        body=body,
        encoding="" if encoding == "identity" else encoding[:40],
        location=response.headers.get("Location"),
    )
