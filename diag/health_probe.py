"""Asks a server's `/health` ten times a second: a trivial request waits as long as the event loop stalls.

One line per probe in `server/health.jsonl`. Any HTTP answer is an answer, also 404 of a server that has no such path.
Probes that a slow one covered are skipped and counted in the next line.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from atom.recipes.errors import UsageError

__all__ = ["HealthProbe"]

PERIOD_S: Final = 0.1
TIMEOUT_S: Final = 10.0
_MAX_BODY_BYTES: Final = 64 * 1024
_REPLY_LIMIT: Final = "the answer's body is larger than 64 KiB"


class HealthProbe:
    """Probes on a fixed schedule, on one connection for as long as the server keeps it."""

    def __init__(self, url: str, *, period_s: float = PERIOD_S, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"the health URL must look like http://host:port/health, got {url!r}")
        self.period_s = period_s
        self.timeout_s = timeout_s
        self._parts = parts
        self._connection: _Connection | None = None
        self._cut = threading.Event()

    def cut(self) -> None:
        """End the probe that is under way, from another thread: it is recorded as failed."""
        self._cut.set()
        connection = self._connection
        if connection is not None:
            connection.shut()

    def run(self, record: Callable[[Mapping[str, Any]], None], stop: threading.Event) -> None:
        """Probe and hand each record to `record` until `stop` is set."""
        due = time.monotonic()
        skipped = 0
        while not stop.wait(max(due - time.monotonic(), 0.0)):
            record({**self.probe(int(due * 1e9)), "skipped": skipped})
            periods = max(1, int((time.monotonic() - due) // self.period_s) + 1)
            skipped = periods - 1
            due += self.period_s * periods
        self._close()

    def probe(self, scheduled_ns: int) -> dict[str, Any]:
        """One probe as the line to record. A kept connection that the server had closed is replaced once."""
        kept = self._connection is not None
        line = self._attempt(scheduled_ns)
        if kept and line["error"] is not None and line["error"].startswith(_STALE):
            line = self._attempt(scheduled_ns)
        return line

    def _attempt(self, scheduled_ns: int) -> dict[str, Any]:
        line: dict[str, Any] = {
            "t_ns": scheduled_ns,
            "sent_ns": time.monotonic_ns(),
            "latency_ns": None,
            "status": None,
            "error": None,
        }
        deadline = time.monotonic() + self.timeout_s
        try:
            if self._connection is None:
                self._connection = _Connection(
                    self._parts.scheme, self._parts.hostname or "", self._parts.port, deadline
                )
            line["sent_ns"] = time.monotonic_ns()
            status, keep = self._connection.get(self._parts.path or "/", deadline)
            line |= {"latency_ns": time.monotonic_ns() - line["sent_ns"], "status": status}
        except (OSError, http.client.HTTPException, ValueError) as error:
            keep = False
            line["error"] = self._describe(error)
        if not keep:
            self._close()
        return line

    def _describe(self, error: Exception) -> str:
        if self._cut.is_set():
            return "the capture ended during this probe"
        if isinstance(error, TimeoutError):
            return f"no complete answer within {self.timeout_s:g} s"
        if isinstance(error, ConnectionRefusedError):
            return "connection refused"
        return f"{type(error).__name__}: {error}"[:200]

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_STALE: Final = ("RemoteDisconnected", "ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError")


class _Connection:
    """A connection whose reads end at a deadline: a server that drips a byte a second does not stretch a probe."""

    def __init__(self, scheme: str, host: str, port: int | None, deadline: float) -> None:
        port = port or (443 if scheme == "https" else 80)
        self._socket: socket.socket = socket.create_connection((host, port), timeout=_left(deadline))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if scheme == "https":
            try:
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
            except BaseException:
                self._socket.close()
                raise
        self._host = f"[{host}]" if ":" in host else host
        self._port = port

    def get(self, path: str, deadline: float) -> tuple[int, bool]:
        """Status of a GET, its body read, and whether the connection can be used again."""
        self._socket.settimeout(_left(deadline))
        head = f"GET {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nAccept: */*\r\n\r\n"
        self._socket.sendall(head.encode("ascii"))
        reader = _Reader(self._socket, deadline)
        response = http.client.HTTPResponse(reader, method="GET")  # type: ignore[arg-type]
        try:
            response.begin()
            if len(response.read(_MAX_BODY_BYTES + 1)) > _MAX_BODY_BYTES:
                raise http.client.HTTPException(_REPLY_LIMIT)
            return response.status, not response.will_close
        finally:
            response.close()

    def shut(self) -> None:
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
