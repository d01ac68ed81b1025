"""Connections through asyncio's transports, for TLS: decryption hides the packets, and with them the kernel's stamps,
so bytes are stamped as they come out of it."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from atom.bench.exchange import Connection, Owner, reason_of

__all__ = ["TlsConnection"]


class TlsConnection(Connection, asyncio.Protocol):
    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._transport: asyncio.Transport | None = None

    @property
    def alive(self) -> bool:
        return self._lost is None and self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._received(data, self._clock.stamp_now())

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone("the server closed the connection" if exc is None else reason_of(exc))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
