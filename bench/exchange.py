"""One request and its response on a connection, whatever carries the bytes.

The order of work is the point. Who reads takes the time of arrival, hands the bytes over and returns; the parsing waits
in the `WorkQueue` until the event loop has seen all sockets that are ready. `bench/plain_socket.py` and
`bench/tls_connection.py` carry the bytes, `bench/connection.py` keeps connections for reuse.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Protocol

from atom.bench.http1 import HttpProtocolError, ResponseParser
from atom.bench.in_flight import InFlight
from atom.bench.kernel_clock import KernelClock
from atom.bench.stream import StreamReader
from atom.bench.work_queue import WorkQueue

__all__ = ["Connection", "Exchange", "Owner", "StaleConnectionError", "reason_of"]


class Exchange:
    """One request and its response on the wire. `done` resolves when the response is over, however it ended."""

    __slots__ = ("connect_ns", "done", "end_ns", "reader", "refused", "retries", "sent_ns", "server")

    def __init__(self, reader: StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        self.reader = reader
        self.done: asyncio.Future[None] = loop.create_future()
        self.sent_ns: int | None = None
        self.end_ns: int | None = None
        self.connect_ns: int | None = None
        self.retries = 0
        self.refused = False
        """The server gave it no connection; what this machine lacks (descriptors, ports) is not its fault."""
        self.server = 0
        """Which of several servers it went to."""


class StaleConnectionError(Exception):
    """A kept-alive connection turned out to be closed before a byte of the response came."""


class Owner(Protocol):
    """Whoever keeps connections."""

    work: WorkQueue
    clock: KernelClock
    in_flight: InFlight

    def release(self, connection: Connection) -> None:
        """It can be used again."""
        ...

    def forget(self, connection: Connection) -> None:
        """It is gone."""
        ...


class Connection:
    """One connection; at most one exchange at a time. Subclasses carry the bytes: they call `_received` and `_gone`."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._work = owner.work
        self._clock = owner.clock
        self._exchange: Exchange | None = None
        self._parser = ResponseParser()
        self._reads: list[bytes] = []
        self._stamps: list[int] = []
        self._floor_ns = 0
        """Nothing that is still to come can have arrived before."""
        self._queued = False
        self._lost: str | None = None
        """Why the connection is gone; None while it is there."""
        self._began = False
        self.served = 0

    @property
    def alive(self) -> bool:
        """It can take a request."""
        raise NotImplementedError

    @property
    def reusable(self) -> bool:
        """It can take another request: `alive`, looked at once more after a time without one."""
        return self.alive

    def abort(self) -> None:
        """Close at once, whatever is on its way."""
        raise NotImplementedError

    def _write(self, data: bytes) -> None:
        """Send all of it; a failure shows as the end of the connection."""
        raise NotImplementedError

    def send(self, exchange: Exchange, data: bytes) -> None:
        assert self._exchange is None
        self._exchange, self._parser, self._began = exchange, ResponseParser(), False
        exchange.sent_ns = self._floor_ns = monotonic_ns()
        self._owner.in_flight.enter(exchange.sent_ns)
        self._write(data)

    def _received(self, data: bytes, stamp: int) -> None:
        self._floor_ns = stamp
        self._stamps.append(stamp)
        self._reads.append(data)
        self._work.backlog += len(data)
        if not self._queued:
            self._queued = True
            self._work.parse(self)

    def _gone(self, reason: str) -> None:
        self._lost = reason
        self._owner.forget(self)
        if not self._queued:
            self._queued = True
            self._work.parse(self)

    def parse(self) -> None:
        """Parse what has been read. Called by the work queue, or directly by who cannot wait."""
        self._queued = False
        if reads := self._reads:
            stamps = self._stamps
            self._reads, self._stamps = [], []
            self._work.backlog -= sum(map(len, reads))
            exchange = self._exchange
            for data, stamp in zip(reads, stamps, strict=True):
                if exchange is None or self._exchange is not exchange:
                    self.abort()  # bytes nobody asked for
                    break
                self._feed(exchange, data, stamp)
        if self._lost is not None and self._exchange is not None:
            self._end_of_file(self._exchange)

    def _feed(self, exchange: Exchange, data: bytes, stamp: int) -> None:
        parser = self._parser
        exchange.end_ns = stamp
        try:
            body = parser.feed(data)
        except HttpProtocolError as error:
            self.stop(exchange, "protocol", str(error))
            return
        if not self._began:
            if not parser.status:
                return
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
            assert exchange.sent_ns is not None
            self._owner.in_flight.leave(exchange.sent_ns)  # it never was on the server, and is sent again
            if not exchange.done.done():
                exchange.done.set_exception(StaleConnectionError())
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
        assert exchange.end_ns is not None
        self._owner.in_flight.leave(exchange.end_ns)
        if reusable and self.alive:
            self._owner.release(self)
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


def reason_of(error: BaseException) -> str:
    """An error of the network in words."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
