"""The client watches itself: a load generator that is the bottleneck measures itself instead of the server."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from atom.bench.rundir import JsonlWriter
from atom.recipes.errors import RunError

__all__ = ["SelfWatch"]

PERIOD_S: Final = 0.01
"""A timer is set this often; how late it fires is the event loop's lag, which is how late a stamp can be."""
WINDOW_S: Final = 1.0


class SelfWatch:
    """Samples the event loop's lag and this thread's share of a CPU; one line a second to `client/<worker>.jsonl`."""

    def __init__(
        self, writer: JsonlWriter, counters: Callable[[], dict[str, Any]], on_error: Callable[[Exception], None]
    ) -> None:
        self._writer = writer
        self._on_error = on_error
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._lags = array("d")
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._window_end = 0.0
        self._window_start_ns = 0
        self._cpu_ns = 0

    def start(self) -> None:
        self._cpu_ns = time.thread_time_ns()
        self._window_start_ns = time.monotonic_ns()
        self._window_end = self._loop.time() + WINDOW_S
        self._arm()

    def restart(self) -> None:
        """Close the window: what comes now belongs to another phase, and what came so far must not count in it."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Stop sampling and write the last window."""
        self.cancel()
        self._flush()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def event(self, name: str, **fields: Any) -> None:
        """Note a moment of the run: the beginning or end of a phase."""
        self._writer.append({"kind": name, "t_ns": time.monotonic_ns(), **fields})

    def _arm(self) -> None:
        self._due = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        now = self._loop.time()
        self._lags.append(now - self._due)
        if now >= self._window_end:
            self._window_end = now + WINDOW_S
            try:
                self._flush()
            except RunError as error:
                self._on_error(error)
        self._arm()

    def _flush(self) -> None:
        now, cpu = time.monotonic_ns(), time.thread_time_ns()
        lags = np.asarray(self._lags) * 1e3
        self._writer.append(
            {
                "kind": "window",
                "t_ns": now,
                "start_ns": self._window_start_ns,
                "cpu_share": (cpu - self._cpu_ns) / max(1, now - self._window_start_ns),
                "lag_ms": [round(value, 3) for value in lags.tolist()],
                **self._counters(),
            }
        )
        self._lags = array("d")
        self._window_start_ns, self._cpu_ns = now, cpu
