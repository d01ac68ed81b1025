"""Waiting in tests for what must happen."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 30.0
"""Generous: it only keeps a failing test from hanging."""
SOONEST_S, LATEST_S = 0.002, 0.02
"""An engine's step takes a millisecond, a look at all processes longer than that: look often at first, then less."""


def until(condition: Callable[[], bool]) -> None:
    """Return once `condition()` holds; fails after `WAIT_S` seconds."""
    deadline = time.monotonic() + WAIT_S
    pause = SOONEST_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(pause)
        pause = min(1.1 * pause, LATEST_S)
