"""Messages between two data paths of one host: a Unix socket that keeps packets apart (SOCK_SEQPACKET), on an abstract
address, which vanishes with its process. Its end says that the process at the other end is gone: the kernel closes it
when the last thread of a killed process is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from typing import Final

from atom.engine.transfer.data_messages import MAX_MESSAGE, Message, decode_message, encode

__all__ = ["SocketLink", "address_of", "listen", "same_user"]

_MAX_UNSENT: Final = 4096
_CREDENTIALS: Final = struct.Struct("iII")
GONE: Final = "the other rank has ended the connection: its process is gone, or refuses this one"


def address_of(name: str) -> bytes:
    return b"\0atom-kv-" + name.encode()


def listen(name: str, backlog: int) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    server.bind(address_of(name))
    server.listen(backlog)
    return server


def same_user(connection: socket.socket) -> bool:
    """Abstract addresses have no permissions: the kernel says who the peer is."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1]) == os.geteuid()


class SocketLink:
    """One connection. `send` may be called in any thread, the rest in the path's."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.name = name
        self.lost: str | None = None
        self.silent = False
        self.bad_messages = 0
        self._unsent: deque[bytes] = deque()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        with self._lock:
            self._unsent.append(encode(message))
            self._flush()

    def flush(self) -> None:
        """What the socket did not take before."""
        if self._unsent:
            with self._lock:
                self._flush()

    def receive(self) -> Message | None:
        """The next message; None when there is none now. Of a lost link what it said before is still received."""
        return self.receive_with_fd(0)[0]

    def receive_with_fd(self, max_fds: int) -> tuple[Message | None, list[int]]:
        try:
            data, fds, _, _ = socket.recv_fds(self.connection, MAX_MESSAGE, max_fds, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return None, []
        except OSError as error:
            self.lose(GONE if isinstance(error, ConnectionError) else f"the other rank cannot be reached: {error}")
            self.silent = True
            return None, []
        if not data:
            self.lose(GONE)
            self.silent = True
            return None, fds
        message = decode_message(data)
        if message is None:
            self.bad_messages += 1
            self.lose("the other rank said something that no rank of this version says")
        return message, fds

    def lose(self, reason: str) -> None:
        """The first reason stays. The connection stays open: its end tells the peer that nothing is written now."""
        if self.lost is None:
            self.lost = reason

    def hang_up(self) -> None:
        """Say no more, and wait for the peer to end the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.connection.close()

    def _flush(self) -> None:
        while self._unsent and self.lost is None:
            try:
                self.connection.send(self._unsent[0])
            except (BlockingIOError, InterruptedError):
                if len(self._unsent) > _MAX_UNSENT:
                    self.lose(f"the other rank reads no messages: {len(self._unsent)} wait")
                return
            except OSError:
                return  # receiving says why, after what the peer said before
            self._unsent.popleft()
