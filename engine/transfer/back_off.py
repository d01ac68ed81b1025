"""Waiting without spinning: a wait inside MPI burns a core, which on a shared machine is taken from whoever is late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from atom.engine.transfer.errors import AgreementStalledError

__all__ = ["BackOff", "wait_for"]

_FIRST_S: Final = 20e-6
_LONGEST_S: Final = 1e-3


class BackOff:
    """Pauses that double from 20 µs to 1 ms while nothing happens."""

    def __init__(self, longest_s: float = _LONGEST_S) -> None:
        self._longest_s = longest_s
        self._next_s = 0.0

    def pause(self) -> None:
        """The first one only gives the processor away."""
        time.sleep(self._next_s)
        self._next_s = min(max(2 * self._next_s, _FIRST_S), self._longest_s)

    def reset(self) -> None:
        self._next_s = 0.0


def wait_for(done: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Return when `done()` says so; AgreementStalledError that says `what` was waited for after `deadline_s`."""
    back_off, until = BackOff(), time.monotonic() + deadline_s
    while not done():
        if time.monotonic() >= until:
            raise AgreementStalledError(f"{what} did not complete within {deadline_s:g} s: a rank is stopped or gone")
        back_off.pause()
