"""Plain TCP connections without asyncio's transports: all sockets in one epoll set of their own.

The set's own descriptor is what the event loop watches, so that a tick in which a thousand streams get a chunk costs
the loop one callback, which reads every socket that is ready in one tight loop.
"""

from __future__ import annotations

import asyncio
import select
import socket
from time import monotonic_ns
from typing import Any, Final

from atom.bench.exchange import Connection, Owner, reason_of
from atom.bench.kernel_clock import ANCILLARY_BYTES, KernelClock, request_stamps
from atom.bench.work_queue import BACKLOG_BYTES, WorkQueue

__all__ = ["PlainConnection", "PlainSockets"]

READ_BYTES: Final = 64 << 10
FRESH_NS: Final = 50_000_000
"""A connection that was read from less long ago is not looked at before it is used again."""
_READ: Final = select.EPOLLIN
_READ_WRITE: Final = select.EPOLLIN | select.EPOLLOUT
_CLOSED: Final = "the server closed the connection"


class PlainSockets:
    """The epoll set of a load's plain connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: WorkQueue, clock: KernelClock) -> None:
        self._loop, self._work, self._clock = loop, work, clock
        self._epoll = select.epoll()
        self._connections: dict[int, PlainConnection] = {}
        # The kernel begins to stamp packets a moment after the first socket asks for it, and stops with the last: this
        # one asks for the whole load.
        self._asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        request_stamps(self._asking)
        loop.add_reader(self._epoll.fileno(), self._drain)

    async def connect(self, owner: Owner, family: int, address: Any) -> PlainConnection:
        """OSError if there is no connection to be had."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request_stamps(sock)
            await self._loop.sock_connect(sock, address)
            connection = PlainConnection(owner, self, sock)
            self._epoll.register(sock, _READ)
        except BaseException:
            sock.close()
            raise
        self._connections[sock.fileno()] = connection
        return connection

    def watch_writing(self, sock: socket.socket, writing: bool) -> None:
        self._epoll.modify(sock, _READ_WRITE if writing else _READ)

    def remove(self, sock: socket.socket) -> None:
        if self._connections.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock)
        sock.close()

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._asking.close()

    def _drain(self) -> None:
        """Read every socket that is ready, once."""
        connections, work = self._connections, self._work
        if work.backlog >= BACKLOG_BYTES:
            return  # called once more before the parsing had its turn
        self._clock.check()
        for descriptor, events in self._epoll.poll(0):
            if (connection := connections.get(descriptor)) is None:
                continue
            try:
                if events & select.EPOLLOUT:
                    connection.writable()
                if events & ~select.EPOLLOUT:
                    connection.readable()
            except Exception as error:
                work.on_error(error)
            if work.backlog >= BACKLOG_BYTES:
                return  # what is not read now is still there after the parsing


class PlainConnection(Connection):
    """A connected, non-blocking socket in a `PlainSockets`."""

    def __init__(self, owner: Owner, sockets: PlainSockets, sock: socket.socket) -> None:
        super().__init__(owner)
        self._sockets = sockets
        self._sock = sock
        self._unsent: memoryview | None = None
        self._broken: str | None = None
        """Why nothing more can be sent; what the server said before may still be there to read."""

    @property
    def alive(self) -> bool:
        return self._lost is None and self._unsent is None and self._broken is None

    @property
    def reusable(self) -> bool:
        """An idle connection has nothing to read: no end that the event loop has not seen yet, and no bytes."""
        if not self.alive:
            return False
        if monotonic_ns() - self._floor_ns < FRESH_NS:
            return True
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            pass
        return False

    def _write(self, data: bytes) -> None:
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._broken = reason_of(error)
            return
        if sent < len(data):
            self._unsent = memoryview(data)[sent:]
            self._sockets.watch_writing(self._sock, True)

    def writable(self) -> None:
        if self._unsent is not None:
            rest, self._unsent = self._unsent, None
            try:
                rest = rest[self._sock.send(rest) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._broken = reason_of(error)
                rest = rest[:0]
            self._unsent = rest if len(rest) else None
        if self._unsent is None and self._lost is None:
            self._sockets.watch_writing(self._sock, False)

    def readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(reason_of(error))
            return
        if data:
            self._received(data, self._clock.stamp(ancillary, self._floor_ns))
        else:
            self._lose(self._broken or _CLOSED)

    def _lose(self, reason: str) -> None:
        self._sockets.remove(self._sock)
        self._gone(reason)

    def abort(self) -> None:
        if self._lost is None:
            self._lose("closed by this client")
