"""The line between `atom ab-compare` and a load that it starts: two begin at the same moment, and none outlives it.

`ATOM_START_GATE=R,W` names two inherited descriptors. The load says `{"event": "ready"}` on W when its server is, waits
for `{"event": "go", "at_ns": …}` (time.monotonic_ns) on R, and begins then; `{"event": "progress", …}` follows twice a
second and `{"event": "loaded"}` when it is over. The end of R is the end of whoever started it: the process then sends
itself SIGTERM, which unwinds it like any other, its server included. The other end is `diag/compare/arm_process.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from functools import cache
from typing import Any, Final

from atom.bench.runner import OnProgress, Progress
from atom.diag.compare.model import START_GATE
from atom.recipes.errors import UsageError

__all__ = ["START_GATE", "StartGate", "start_gate"]

_PERIOD_S: Final = 0.5
_UNWIND_S: Final = 120.0
"""What an orphan may take to end by itself. What it started ends with it in any case."""
_LONGEST_LINE: Final = 4096


@cache
def start_gate() -> StartGate | None:
    """This process's gate; None where there is none. UsageError if the variable names no two descriptors."""
    text = os.environ.pop(START_GATE, None)  # not for the server
    if not text:
        return None
    try:
        read_fd, write_fd = map(int, text.split(","))
        for fd in (read_fd, write_fd):
            os.set_inheritable(fd, False)
    except (ValueError, OSError):
        raise UsageError(f"{START_GATE} must be two open descriptors R,W; got {text!r}") from None
    return StartGate(read_fd, write_fd)


class StartGate:
    """This process's side of the line. One thread reads it and reports progress."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._go = threading.Event()
        self._at_ns = 0
        self._progress: Progress | None = None
        os.set_blocking(write_fd, False)  # a reader that does not keep up must not hold a load
        threading.Thread(target=self._run, name="atom-start-gate", daemon=True).start()

    def pass_through(self, abandon: threading.Event) -> None:
        """Say that everything is ready, and wait for the word to begin; or until `abandon` is set, for then there is
        nothing left to wait for. Once open it stays so."""
        if self._go.is_set():
            return
        self._say("ready")
        while not self._go.wait(0.05) and not abandon.is_set():
            pass
        if not abandon.is_set():
            time.sleep(max(self._at_ns - time.monotonic_ns(), 0) / 1e9)

    def reporting(self, also: OnProgress) -> OnProgress:
        """Gets the load's progress, and passes it on to `also`."""

        def report(progress: Progress) -> None:
            self._progress = progress
            also(progress)

        return report

    def loaded(self) -> None:
        self._progress = None
        self._say("loaded")

    def _run(self) -> None:
        rest = b""
        while True:
            if select.select([self._read_fd], [], [], _PERIOD_S)[0]:
                data = os.read(self._read_fd, _LONGEST_LINE)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._obey(line)
            if self._progress is not None:
                self._say("progress", **_figures(self._progress))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_UNWIND_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def _obey(self, line: bytes) -> None:
        message = json.loads(line)
        if message["event"] == "go":
            self._at_ns = int(message["at_ns"])
            self._go.set()

    def _say(self, event: str, **fields: Any) -> None:
        """In one write of less than PIPE_BUF, so it goes in whole or, where nobody reads, not at all."""
        with contextlib.suppress(OSError):
            os.write(self._write_fd, json.dumps({"event": event, **fields}).encode() + b"\n")


def _figures(progress: Progress) -> dict[str, Any]:
    return {
        "phase": progress.phase,
        "done": progress.done,
        "total": progress.total,
        "failed": progress.failed,
        "running": progress.running,
        "output_tokens": progress.output_tokens,
        "elapsed_s": round(progress.elapsed_s, 3),
    }
