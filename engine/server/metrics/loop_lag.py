"""How late the event loop is: a timer that fires 20 times a second and notes by how much it was held up.

Whatever stalls the loop (a garbage collection, a long callback, another thread that keeps the interpreter) delays
every stream, and a server's other metrics cannot tell which of them it was late by. A stall is one observation, of its
length less up to one interval, so the histogram's sum over a minute is about the time for which the loop did nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from atom.engine.server.metrics.histogram import Histogram

INTERVAL_S: Final = 0.05


class LoopLagTimer:
    """Observes into `lag` from `start` to `stop`, both on the loop."""

    def __init__(self, lag: Histogram) -> None:
        self._lag = lag
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = 0.0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        assert self._loop is not None
        # Not the loop's own clock: uvloop's counts whole milliseconds.
        self._due = time.monotonic() + INTERVAL_S
        self._timer = self._loop.call_later(INTERVAL_S, self._fire)

    def _fire(self) -> None:
        self._lag.observe(max(0.0, time.monotonic() - self._due))
        self._arm()
