"""What `atom gc-profile` does with a server while it is recorded: a load (`cli/load_run.py`), or watching it here."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from atom.bench.rundir import RunDirectory, Validity
from atom.bench.runner import LoadOutcome
from atom.cli.progress import PLAIN_PERIOD_S, StatusLine
from atom.cli.signals import ending_signals, note
from atom.diag.observe import observe
from atom.diag.server_under_test import ServerUnderTest

__all__ = ["Observation", "Work", "WorkFactory"]

_SLICE_S: Final = 0.2


class Work(Protocol):
    """One server's traffic. Use once."""

    started: bool
    """Whether it began: only then is there something to keep."""

    @property
    def ended_by(self) -> int | None:
        """The signal that ended it early."""
        ...

    def check(self) -> None:
        """UsageError for what cannot be, before any server starts."""
        ...

    def run(self, server: ServerUnderTest, run_dir: RunDirectory) -> LoadOutcome: ...

    def judge(self, run_dir: RunDirectory, outcome: LoadOutcome) -> tuple[Validity, list[str]]: ...


WorkFactory = Callable[[StatusLine], Work]


@dataclass(kw_only=True, slots=True)
class Observation:
    """No load of ours: the server is recorded until the time is over, somebody says so, or it dies.

    Without a duration Ctrl-C is how it ends, and no interruption; SIGTERM and SIGHUP end it early in any case.
    """

    duration_s: float | None
    line: StatusLine
    quiet: bool
    started: bool = field(default=False, init=False)
    _signal: int | None = field(default=None, init=False)

    @property
    def ended_by(self) -> int | None:
        normal = self._signal == signal.SIGINT and self.duration_s is None
        return None if normal else self._signal

    def check(self) -> None:
        """Whatever the options allow can be watched."""

    def run(self, server: ServerUnderTest, run_dir: RunDirectory) -> LoadOutcome:
        self.started = True
        stop = threading.Event()
        outcomes: list[LoadOutcome] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                outcomes.append(observe(server, self.duration_s, stop, run_dir))
            except BaseException as error:
                errors.append(error)

        # On a thread: a handler that set an Event which this one waits for could find its lock taken.
        thread = threading.Thread(target=work, name="atom-observe")
        with self._signals():
            thread.start()
            begun, shown = time.monotonic(), -PLAIN_PERIOD_S
            while thread.is_alive():
                thread.join(_SLICE_S)
                if self._signal is not None:
                    stop.set()
                elapsed = time.monotonic() - begun
                if not self.quiet and (self.line.terminal or elapsed - shown >= PLAIN_PERIOD_S):
                    self.line.show(self._progress(elapsed))
                    shown = elapsed
        self.line.clear()
        if errors:
            raise errors[0]
        return outcomes[0]

    def judge(self, run_dir: RunDirectory, outcome: LoadOutcome) -> tuple[Validity, list[str]]:
        if outcome.interrupted and self.ended_by is not None:
            return Validity.INTERRUPTED, [f"ended by {signal.Signals(self.ended_by).name} before its time"]
        return Validity.VALID, []

    def _progress(self, elapsed: float) -> str:
        if self.duration_s is None:
            return f"watching for {elapsed:,.0f} s; Ctrl-C ends it and prints the profile"
        return f"watching for {elapsed:,.0f} of {self.duration_s:,.0f} s"

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def take(number: int, _frame: object) -> None:
            note()
            self._signal = self._signal or number

        previous: dict[int, Any] = {number: signal.signal(number, take) for number in ending_signals()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
