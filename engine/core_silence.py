"""For how long a core has owed an answer: a process that is stopped, or a step that hangs, says nothing.

A core reports every step, so silence while it has requests in hand is a step that takes as long, or none at all; which,
nobody outside can tell. How long is too long is for whoever asks (`--core-timeout` of the server).
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CoreSilence"]


class CoreSilence:
    """`sent` by one thread at a time, `heard` by the output thread, `seconds` by any. Times are monotonic seconds."""

    def __init__(self, num_engines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = [0.0] * num_engines
        self._heard = [0.0] * num_engines

    def sent(self, engine_index: int) -> None:
        """It gets the first request in its hand. That earlier ones were given up without a word from it is no answer:
        clients that lose patience must not hide it."""
        if self._heard[engine_index] >= self._asked[engine_index]:
            self._asked[engine_index] = self._clock()

    def heard(self, engine_index: int) -> None:
        self._heard[engine_index] = self._clock()

    def seconds(self, engine_index: int) -> float:
        """Since it was last heard or asked. Means something while it has requests in hand."""
        return self._clock() - max(self._asked[engine_index], self._heard[engine_index])
