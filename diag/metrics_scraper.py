"""Scrapes a server's `/metrics` once a second, as Prometheus would, and records what that cost and what it said.

One line per scrape in `server/metrics-<role>.jsonl`. What was not seen is null: a server that refuses, answers garbage
or hangs leaves a complete record.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from atom.diag.dialects import names_for
from atom.diag.prometheus_text import parse_metrics
from atom.recipes.errors import UsageError
from atom.recipes.recipe import MetricsDialect

__all__ = ["MetricsScraper", "Response", "ScrapeError", "fetch"]

PERIOD_S: Final = 1.0
TIMEOUT_S: Final = 10.0
MAX_BODY_BYTES: Final = 64 << 20


class ScrapeError(Exception):
    """No usable answer; the message says why in a few words."""


@dataclass(frozen=True, slots=True)
class Response:
    sent_ns: int
    """Just before the request's first byte was sent; the connection was open by then."""
    latency_ns: int
    """First byte sent to last byte read."""
    connect_ns: int
    status: int
    body: bytes


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
    return Response(sent, ended - sent, sent - begun, response.status, body)


class MetricsScraper:
    """Scrapes on a fixed schedule; a scrape that takes longer than a period skips the ones it covered."""

    def __init__(self, url: str, dialect: MetricsDialect, *, period_s: float = PERIOD_S, timeout_s: float = TIMEOUT_S):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"the metrics URL must look like http://host:port/metrics, got {url!r}")
        self.url = url
        self.period_s = period_s
        self.timeout_s = timeout_s
        self._wanted = names_for(dialect)
        self._exchange = Exchange()

    def cut(self) -> None:
        """End the scrape that is under way, from another thread: it is recorded as failed."""
        self._exchange.cut("the capture ended during this scrape")

    def run(self, record: Callable[[Mapping[str, Any]], None], stop: threading.Event) -> None:
        """Scrape and hand each record to `record` until `stop` is set."""
        due = time.monotonic()
        while not stop.wait(max(due - time.monotonic(), 0.0)):
            record(self.scrape(int(due * 1e9)))
            behind = time.monotonic() - due
            due += self.period_s * max(1, int(behind // self.period_s) + 1)

    def scrape(self, scheduled_ns: int) -> dict[str, Any]:
        """One scrape as the line to record."""
        line: dict[str, Any] = {
            "scheduled_ns": scheduled_ns,
            "sent_ns": time.monotonic_ns(),
            "latency_ns": None,
            "connect_ns": None,
            "status": None,
            "body_bytes": None,
            "series": None,
            "families": None,
            "largest_families": None,
            "malformed_lines": None,
            "values": dict.fromkeys(self._wanted),
            "error": None,
        }
        self._exchange = Exchange()
        try:
            response = fetch(self.url, timeout_s=self.timeout_s, exchange=self._exchange)
        except ScrapeError as error:
            return {**line, "error": str(error)}
        line |= {
            "sent_ns": response.sent_ns,
            "latency_ns": response.latency_ns,
            "connect_ns": response.connect_ns,
            "status": response.status,
            "body_bytes": len(response.body),
        }
        if response.status != 200:
            return {**line, "error": f"HTTP {response.status}"}
        text = parse_metrics(response.body, self._wanted)
        return {
            **line,
            "series": text.series,
            "families": text.families,
            "largest_families": text.largest,
            "malformed_lines": text.malformed,
            "values": text.values,
            "error": "no Prometheus text" if text.malformed and not text.series else None,
        }
