"""The servers of a load: a connection pool for each, and requests to each in turn."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from atom.bench.connection import ConnectionPool
from atom.bench.exchange import Exchange
from atom.bench.http1 import request_head
from atom.bench.in_flight import InFlight
from atom.bench.kernel_clock import KernelClock
from atom.bench.load import Endpoint
from atom.bench.plain_socket import PlainSockets
from atom.bench.work_queue import WorkQueue

__all__ = ["ServerPools", "open_pools"]


@dataclass(frozen=True, slots=True)
class _Server:
    pool: ConnectionPool
    head: bytes
    """Of every request to it, without Content-Length and the blank line."""


class ServerPools:
    """What a load sends its requests through. Made by `open_pools`."""

    def __init__(self, servers: list[_Server], sockets: PlainSockets, clock: KernelClock, in_flight: InFlight) -> None:
        self._servers = servers
        self._sockets = sockets
        self._clock = clock
        self.in_flight = in_flight
        self._next = 0

    @property
    def opened(self) -> int:
        """Connections, to all servers."""
        return sum(server.pool.opened for server in self._servers)

    @property
    def sent(self) -> int:
        """Requests whose bytes went out; one that is sent again counts once."""
        return sum(server.pool.sent for server in self._servers)

    @property
    def stamps(self) -> dict[str, int]:
        """How many reads have their time of arrival from the kernel, and how many from the moment of the read."""
        return self._clock.counts

    async def perform(self, exchange: Exchange, body: bytes, timeout: float) -> None:
        """Send `body` to the next server and wait for the end of the response, a failure, or `timeout` seconds.

        Failures end up in `exchange.reader`, never as an exception; on cancellation the partial response is kept.
        """
        number = exchange.server = self._next
        self._next = (number + 1) % len(self._servers)
        server = self._servers[number]
        await server.pool.perform(exchange, b"%bContent-Length: %d\r\n\r\n%b" % (server.head, len(body), body), timeout)

    def close(self) -> None:
        for server in self._servers:
            server.pool.close()
        self._sockets.close()


def open_pools(endpoint: Endpoint, work: WorkQueue) -> ServerPools:
    """Pools for all servers of `endpoint`. Nothing is connected yet."""
    clock = KernelClock()
    sockets, in_flight = PlainSockets(asyncio.get_running_loop(), work, clock), InFlight()

    def pool(base_url: str) -> ConnectionPool:
        host, port, tls = _address(base_url, endpoint)
        return ConnectionPool(
            host,
            port,
            work,
            clock=clock,
            sockets=sockets,
            in_flight=in_flight,
            tls=tls,
            connect_timeout=endpoint.connect_timeout,
        )

    servers = [_Server(pool(url), _head(url, endpoint)) for url in endpoint.base_urls]
    return ServerPools(servers, sockets, clock, in_flight)


def _address(base_url: str, endpoint: Endpoint) -> tuple[str, int, ssl.SSLContext | None]:
    url = urlsplit(base_url)
    tls: ssl.SSLContext | None = None
    if url.scheme == "https":
        tls = ssl.create_default_context()
        if not endpoint.verify_tls:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    assert url.hostname is not None
    return url.hostname, url.port or (443 if tls else 80), tls


def _head(base_url: str, endpoint: Endpoint) -> bytes:
    url = urlsplit(base_url)
    headers = {
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": "atom-bench",
    }
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    lower = {name.lower() for name in endpoint.headers}
    headers = {name: value for name, value in headers.items() if name.lower() not in lower}
    host = url.netloc.rpartition("@")[2]
    return request_head("POST", host, url.path.rstrip("/") + endpoint.path, {**headers, **endpoint.headers})
