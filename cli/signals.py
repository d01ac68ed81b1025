"""How a command takes the signals that end it: each unwinds, so that servers are stopped and run directories sealed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

__all__ = ["Terminated", "ending_signals", "note", "raising", "status_of"]

DOUBLE_S: Final = 1.0
"""A signal this soon after another one is the same wish (a double Ctrl-C), and must not break off the unwinding."""

_last = -DOUBLE_S


class Terminated(SystemExit):
    """SIGTERM or SIGHUP arrived; unwinds like Ctrl-C."""


def ending_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM, and SIGHUP unless the process was started to survive it (`nohup`)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def status_of(number: int) -> int:
    """The exit status of a command that a signal ended, as a shell says it."""
    return 128 + number


def note() -> bool:
    """A signal arrived. Whether it is a new wish to end."""
    global _last
    previous, _last = _last, time.monotonic()
    return _last - previous >= DOUBLE_S


@contextmanager
def raising() -> Iterator[None]:
    """Turns the signals that end a command into KeyboardInterrupt and Terminated while it runs.

    SIGINT is taken also where it was ignored: shell scripts start background jobs that way, and `kill -INT` must reach
    a run there too.
    """
    previous: dict[int, Any] = {number: signal.signal(number, _raise) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None:  # None: not installed from Python
                signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    if not note():
        return
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(status_of(number))
