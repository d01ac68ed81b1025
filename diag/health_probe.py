"""Asks a server's `/health` ten times a second: a trivial request waits as long as the event loop stalls.

One line per probe in `server/health.jsonl`. Any HTTP answer is an answer, also 404 of a server that has no such path.
Probes that a slow one covered are skipped and counted in the next line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from atom.diag.http_fetch import FAILURES, Connection, describe_failure
from atom.recipes.errors import UsageError

__all__ = ["HealthProbe"]

PERIOD_S: Final = 0.1
TIMEOUT_S: Final = 10.0
_MAX_BODY_BYTES: Final = 64 * 1024


class HealthProbe:
    """Probes on a fixed schedule, on one connection for as long as the server keeps it."""

    def __init__(self, url: str, *, period_s: float = PERIOD_S, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"the health URL must look like http://host:port/health, got {url!r}")
        self.period_s = period_s
        self.timeout_s = timeout_s
        self._parts = parts
        self._connection: Connection | None = None
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
                self._connection = Connection(self._parts, deadline)
            line["sent_ns"] = time.monotonic_ns()
            answer = self._connection.get(deadline, max_bytes=_MAX_BODY_BYTES)
            line |= {"latency_ns": time.monotonic_ns() - line["sent_ns"], "status": answer.status}
            keep = answer.reusable
        except FAILURES as error:
            keep = False
            line["error"] = _CUT if self._cut.is_set() else describe_failure(error, self.timeout_s)
        if not keep:
            self._close()
        return line

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_CUT: Final = "the capture ended during this probe"
_STALE: Final = ("RemoteDisconnected", "ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError")
