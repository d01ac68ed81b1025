"""Connections to a server: keep-alive pool, sending, and the stamping of every read the moment it arrives.

The order of work is the point of this file. `data_received` takes the time first, appends the bytes, and returns; the
parsing of what was read waits in a `WorkQueue` until the event loop has seen all sockets that are ready, and then runs
in slices too short to make the next stamp late.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Final, cast

from atom.bench.http1 import HttpProtocolError, ResponseParser
from atom.bench.stream import StreamReader

__all__ = ["ConnectionPool", "Exchange", "WorkQueue"]

SLICE_NS: Final = 200_000
"""Longest stretch of deferred work between two looks at the sockets."""
BACKLOG_BYTES: Final = 16 << 20
"""Unparsed bytes above which parsing goes before reading, so that memory stays bounded."""


class WorkQueue:
    """Work that can wait for a quiet moment: parsing first, then records to write."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_error: Callable[[Exception], None]) -> None:
        """`on_error` is told of an exception in the work; the work after it goes on."""
        self._loop = loop
        self._on_error = on_error
        self._parse: deque[_Connection] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self.backlog = 0
        """Bytes read and not parsed yet."""
        self.max_backlog = 0

    def parse(self, connection: _Connection) -> None:
        self._parse.append(connection)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._slice)

    def later(self, work: Callable[[], None]) -> None:
        self._later.append(work)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._slice)

    def drain(self) -> None:
        """Do all of it now."""
        while self._parse:
            self._do(self._parse.popleft().parse)
        while self._later:
            self._do(self._later.popleft())

    def _slice(self) -> None:
        end = monotonic_ns() + SLICE_NS
        self.max_backlog = max(self.max_backlog, self.backlog)
        while self._parse:
            self._do(self._parse.popleft().parse)
            if monotonic_ns() >= end and self.backlog < BACKLOG_BYTES:
                break
        while self._later and monotonic_ns() < end:
            self._do(self._later.popleft())
        if self._parse or self._later:
            self._loop.call_soon(self._slice)
        else:
            self._scheduled = False

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._on_error(error)


class Exchange:
    """One request and its response on the wire. `done` resolves when the response is over, however it ended."""

    __slots__ = ("connect_ns", "done", "end_ns", "reader", "retries", "sent_ns")

    def __init__(self, reader: StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        self.reader = reader
        self.done: asyncio.Future[None] = loop.create_future()
        self.sent_ns: int | None = None
        self.end_ns: int | None = None
        self.connect_ns: int | None = None
        self.retries = 0


class _Stale(Exception):
    """A kept-alive connection turned out to be closed before a byte of the response came."""


class _Connection(asyncio.Protocol):
    """One connection; at most one exchange at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._work = pool.work
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser = ResponseParser()
        self._reads: list[bytes] = []
        self._stamps: list[int] = []
        self._queued = False
        self._lost: str | None = None
        """Why the connection is gone; None while it is there."""
        self._began = False
        self.served = 0

    @property
    def alive(self) -> bool:
        return self._lost is None and self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, exchange: Exchange, data: bytes) -> None:
        assert self._transport is not None
        assert self._exchange is None
        self._exchange, self._parser, self._began = exchange, ResponseParser(), False
        exchange.sent_ns = monotonic_ns()
        self._pool.sent += 1
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        now = monotonic_ns()
        self._stamps.append(now)
        self._reads.append(data)
        self._work.backlog += len(data)
        if not self._queued:
            self._queued = True
            self._work.parse(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = "the server closed the connection" if exc is None else _reason(exc)
        self._pool.forget(self)
        if not self._queued:
            self._queued = True
            self._work.parse(self)

    def parse(self) -> None:
        """Parse what has been read. Called by the work queue, or directly by who cannot wait."""
        self._queued = False
        reads, stamps = self._reads, self._stamps
        if reads:
            self._reads, self._stamps = [], []
            exchange = self._exchange
            for data, stamp in zip(reads, stamps, strict=True):
                self._work.backlog -= len(data)
                if exchange is None or self._exchange is not exchange:
                    self.abort()  # bytes nobody asked for
                    continue
                exchange.end_ns = stamp
                self._feed(exchange, data, stamp)
        if self._lost is not None and self._exchange is not None:
            self._end_of_file(self._exchange)

    def _feed(self, exchange: Exchange, data: bytes, stamp: int) -> None:
        parser = self._parser
        try:
            body = parser.feed(data)
        except HttpProtocolError as error:
            self.stop(exchange, "protocol", str(error))
            return
        if not self._began and parser.status:
            self._began = True
            exchange.reader.begin(parser.status, parser.headers)
        if body:
            exchange.reader.feed(body, stamp)
        if parser.complete:
            self._end(exchange, cut=False, reusable=parser.keep_alive and not parser.excess)

    def _end_of_file(self, exchange: Exchange) -> None:
        reason = self._lost or "the connection ended"
        if exchange.end_ns is None and self.served and not self._parser.status:
            self._exchange = None
            if not exchange.done.done():
                exchange.done.set_exception(_Stale())
            return
        if exchange.end_ns is None:
            exchange.end_ns = monotonic_ns()
        if not self._began:
            exchange.reader.fail("connection", f"{reason} before it answered")
        self._end(exchange, cut=not self._parser.eof(), reusable=False)

    def _end(self, exchange: Exchange, *, cut: bool, reusable: bool) -> None:
        exchange.reader.finish(cut=cut)
        self._close(exchange, reusable=reusable)

    def _close(self, exchange: Exchange, *, reusable: bool) -> None:
        self._exchange = None
        self.served += 1
        if reusable and self.alive:
            self._pool.release(self)
        else:
            self.abort()
        if not exchange.done.done():
            exchange.done.set_result(None)

    def stop(self, exchange: Exchange, kind: str, message: str) -> None:
        """End the exchange from this side: the stream's incompleteness is then no anomaly of the server's."""
        if self._exchange is exchange:
            exchange.reader.fail(kind, message)
            exchange.end_ns = monotonic_ns()
            self._close(exchange, reusable=False)

    def expire(self, exchange: Exchange, kind: str, message: str) -> None:
        """`stop`, after what has already been read."""
        self.parse()
        self.stop(exchange, kind, message)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class ConnectionPool:
    """Keep-alive connections to one server, most recently used first, as many as there are requests at once."""

    def __init__(
        self, host: str, port: int, work: WorkQueue, *, tls: ssl.SSLContext | None = None, connect_timeout: float = 30.0
    ) -> None:
        self.work = work
        self._loop = asyncio.get_running_loop()
        self._host, self._port, self._tls, self._connect_timeout = host, port, tls, connect_timeout
        self._address: str | None = None
        self._idle: dict[_Connection, None] = {}
        self._all: set[_Connection] = set()
        self.opened = 0
        self.sent = 0
        """Requests whose bytes went out; one that is sent again counts once."""

    async def perform(self, exchange: Exchange, data: bytes, timeout: float) -> None:
        """Send `data` (head and body) and wait for the end of the response, a failure, or `timeout` seconds.

        Failures end up in `exchange.reader`, never as an exception; on cancellation the partial response is kept.
        """
        for attempt in (0, 1):
            try:
                connection = await self._acquire(exchange, fresh=attempt > 0)
            except (OSError, TimeoutError) as error:
                exchange.end_ns = monotonic_ns()
                exchange.reader.fail("connect", f"cannot connect to {self._host}:{self._port}: {_reason(error)}")
                return
            except asyncio.CancelledError:
                exchange.end_ns = monotonic_ns()
                raise
            connection.send(exchange, data)
            timer = self._loop.call_later(
                timeout, connection.expire, exchange, "timeout", f"no complete response within {timeout:g} s"
            )
            try:
                await exchange.done
                return
            except _Stale:
                exchange.retries += 1
                self.sent -= 1
                exchange.sent_ns = None
                exchange.done = self._loop.create_future()
            except asyncio.CancelledError:
                connection.expire(exchange, "cancelled", "cancelled by the client")
                raise
            finally:
                timer.cancel()

    async def _acquire(self, exchange: Exchange, *, fresh: bool) -> _Connection:
        while self._idle and not fresh:
            connection, _ = self._idle.popitem()
            if connection.alive:
                exchange.connect_ns = None
                return connection
        start = monotonic_ns()
        connection = await asyncio.wait_for(self._connect(), self._connect_timeout)
        exchange.connect_ns = monotonic_ns() - start
        return connection

    async def _connect(self) -> _Connection:
        # The address that worked once is used again: a name is resolved in a thread, which no request should wait for.
        transport, connection = await self._loop.create_connection(
            lambda: _Connection(self),
            self._address or self._host,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        self._address = self._address or transport.get_extra_info("peername")[0]
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._all.add(connection)
        self.opened += 1
        return connection

    def release(self, connection: _Connection) -> None:
        self._idle[connection] = None

    def forget(self, connection: _Connection) -> None:
        self._idle.pop(connection, None)
        self._all.discard(connection)

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
