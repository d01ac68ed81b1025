"""When a load gives up on a server: nobody has taken a connection for a while. A server that a recipe started is
watched by its process as well (`diag/server_under_test.py`)."""

from __future__ import annotations

from time import monotonic_ns
from typing import Final

__all__ = ["REFUSED_PAUSE_S", "ServerGone"]

PATIENCE_S: Final = 5.0
REFUSED_PAUSE_S: Final = 0.1
"""A lane without a connection rests this long: thousands of requests would be burnt in the time of a restart."""


class ServerGone:
    """Told of every connection that was had, or not to be had."""

    def __init__(self) -> None:
        self._refused_since_ns: int | None = None
        self.reason: str | None = None
        """Set when the patience is over."""

    def connected(self) -> None:
        self._refused_since_ns = None

    def refused(self) -> bool:
        """Whether that was once too often."""
        now = monotonic_ns()
        if self._refused_since_ns is None:
            self._refused_since_ns = now
        if self.reason is None and now - self._refused_since_ns > PATIENCE_S * 1e9:
            self.reason = f"the server is gone: no connection to be had for {PATIENCE_S:g} s"
        return self.reason is not None
