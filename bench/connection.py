"""Keep-alive connections to one server: opened as needed, used again most recently used first.

What happens on a connection is in `bench/exchange.py`; several servers in `bench/pools.py`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, Final

from atom.bench.exchange import Connection, Exchange, StaleConnectionError, reason_of
from atom.bench.in_flight import InFlight
from atom.bench.kernel_clock import KernelClock
from atom.bench.plain_socket import PlainSockets
from atom.bench.tls_connection import TlsConnection
from atom.bench.work_queue import WorkQueue

__all__ = ["ConnectionPool", "Exchange", "WorkQueue"]

Addresses = Sequence[tuple[int, Any]]
"""Family and socket address, the one to try first in front."""

_OWN_LIMITS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


class ConnectionPool:
    """As many connections to one server as there are requests at once."""

    def __init__(
        self,
        host: str,
        port: int,
        work: WorkQueue,
        *,
        clock: KernelClock | None = None,
        sockets: PlainSockets | None = None,
        in_flight: InFlight | None = None,
        tls: ssl.SSLContext | None = None,
        connect_timeout: float = 30.0,
    ) -> None:
        """`clock`, `sockets` and `in_flight` are shared by the pools of one load; a pool alone has its own."""
        self.work = work
        self.clock = clock or KernelClock()
        self.in_flight = in_flight or InFlight()
        self._loop = asyncio.get_running_loop()
        self._host, self._port, self._tls, self._connect_timeout = host, port, tls, connect_timeout
        self._sockets = sockets or PlainSockets(self._loop, work, self.clock)
        self._owns_sockets = sockets is None
        self._resolving: asyncio.Future[Addresses] | None = None
        self._idle: dict[Connection, None] = {}
        self._all: set[Connection] = set()
        self.opened = 0
        self.sent = 0
        """Requests whose bytes went out; one that is sent again counts once."""

    @property
    def busy(self) -> int:
        """Connections with a request on them."""
        return len(self._all) - len(self._idle)

    async def perform(self, exchange: Exchange, data: bytes, timeout: float) -> None:
        """Send `data` (head and body) and wait for the end of the response, a failure, or `timeout` seconds.

        Failures end up in `exchange.reader`, never as an exception; on cancellation the partial response is kept.
        """
        for attempt in (0, 1):
            try:
                connection = await self._acquire(exchange, fresh=attempt > 0)
            except (OSError, TimeoutError) as error:
                exchange.end_ns = monotonic_ns()
                exchange.refused = error.errno not in _OWN_LIMITS
                exchange.reader.fail("connect", f"cannot connect to {self._host}:{self._port}: {reason_of(error)}")
                return
            except asyncio.CancelledError:
                exchange.end_ns = monotonic_ns()
                raise
            connection.send(exchange, data)
            self.sent += 1
            timer = self._loop.call_later(
                timeout, connection.expire, exchange, "timeout", f"no complete response within {timeout:g} s"
            )
            try:
                await exchange.done
                return
            except StaleConnectionError:
                exchange.retries += 1
                self.sent -= 1
                exchange.sent_ns = None
                exchange.done = self._loop.create_future()
            except asyncio.CancelledError:
                connection.expire(exchange, "cancelled", "cancelled by the client")
                if exchange.end_ns is None:  # it turned out to be closed in the same turn of the loop
                    exchange.end_ns = monotonic_ns()
                    if exchange.done.done() and not exchange.done.cancelled():
                        exchange.done.exception()
                raise
            finally:
                timer.cancel()

    async def _acquire(self, exchange: Exchange, *, fresh: bool) -> Connection:
        while self._idle and not fresh:
            connection, _ = self._idle.popitem()
            if connection.reusable:
                exchange.connect_ns = None
                return connection
            connection.abort()
        start = monotonic_ns()
        connection = await asyncio.wait_for(self._connect(), self._connect_timeout)
        exchange.connect_ns = monotonic_ns() - start
        return connection

    async def _connect(self) -> Connection:
        last: OSError | None = None
        addresses = await self._resolve()
        for entry in addresses:
            try:
                connection = await self._connect_to(*entry)
            except OSError as error:
                last = error
                continue
            if entry != addresses[0]:
                self._resolving = self._loop.create_future()  # the address that worked goes first from now on
                self._resolving.set_result([entry, *(other for other in addresses if other != entry)])
            self._all.add(connection)
            self.opened += 1
            return connection
        raise last or OSError("its name has no address")

    async def _connect_to(self, family: int, address: Any) -> Connection:
        if self._tls is None:
            return await self._sockets.connect(self, family, address)
        _, connection = await self._loop.create_connection(
            lambda: TlsConnection(self), address[0], address[1], ssl=self._tls, server_hostname=self._host
        )
        return connection

    async def _resolve(self) -> Addresses:
        """Asked once, in a thread, whoever waits for it; asked again only after it failed."""
        if self._resolving is None or (
            self._resolving.done() and (self._resolving.cancelled() or self._resolving.exception())
        ):
            self._resolving = asyncio.ensure_future(self._look_up())
        return await asyncio.shield(self._resolving)

    async def _look_up(self) -> Addresses:
        found = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]

    def release(self, connection: Connection) -> None:
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._all.discard(connection)

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()
        if self._resolving is not None:
            self._resolving.cancel()
        if self._owns_sockets:
            self._sockets.close()
