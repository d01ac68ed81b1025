"""How many requests are on the servers, integrated over time at the sockets: one side of Little's law. The other side
is made from the records (`bench/validity.py`)."""

from __future__ import annotations

from time import monotonic_ns

__all__ = ["InFlight"]


class InFlight:
    """Counts requests between sent and ended, over all connections of a load."""

    def __init__(self) -> None:
        self.count = 0
        self._integral_ns = 0
        self._changed_ns = monotonic_ns()

    def enter(self, sent_ns: int) -> None:
        self._advance(sent_ns)
        self.count += 1

    def leave(self, ended_ns: int) -> None:
        """`ended_ns` may lie in the past: a response is over when its last byte has come, and noticed when it is
        parsed."""
        now = monotonic_ns()
        self._advance(now)
        self.count -= 1
        self._integral_ns -= now - ended_ns

    def integral_ns(self) -> int:
        """Σ over time of how many there were, up to now."""
        self._advance(monotonic_ns())
        return self._integral_ns

    def _advance(self, now: int) -> None:
        self._integral_ns += self.count * (now - self._changed_ns)
        self._changed_ns = now
