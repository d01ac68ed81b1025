"""Drives a load: `run_load(spec, run_dir, on_progress, stop) -> LoadOutcome`. Warm-up, then the measured phase; records go to the run
directory as requests end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LoadOutcome", "Progress"]


@dataclass(slots=True)
class Progress:
    """Live counters; one object for the whole run, updated in place. Read it, keep nothing of it."""

    phase: str = "starting"
    """`starting`, `warmup`, `measured` or `done`."""
    total: int = 0
    sent: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0
    ttft_ms: float | None = None
    """Mean of the requests completed so far."""

    @property
    def done(self) -> int:
        return self.completed + self.failed + self.cancelled


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOutcome:
    """What happened, before any statistics (`bench/summary.py` makes them from the run directory)."""

    started_ns: int
    """`time.monotonic_ns` at the start of the measured phase."""
    ended_ns: int
    sent: int
    completed: int
    failed: int
    cancelled: int
    interrupted: bool
    """`stop` was set before the load was done."""
    first_error: str | None
    saturation: tuple[str, ...]
    """Why the client itself was the bottleneck; empty when it was not."""


OnProgress = Callable[[Progress], None]
