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
    """Told of every connection that was not to be had. One that was, or a request that still runs, is a server that is
    there."""

    def __init__(self) -> None:
        self._since_ns = 0
        self._sent: int | None = None
        self.reason: str | None = None
        """Set when the patience is over."""

    def refused(self, sent: int, in_flight: int) -> bool:
        """Whether that was once too often. `sent`: requests that have had a connection so far; `in_flight`: those that
        are still on theirs."""
        now = monotonic_ns()
        if sent != self._sent or in_flight:
            self._sent, self._since_ns = sent, now
        elif self.reason is None and now - self._since_ns > PATIENCE_S * 1e9:
            self.reason = f"the server is gone: no connection to be had for {PATIENCE_S:g} s"
        return self.reason is not None
