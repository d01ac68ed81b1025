"""Live progress on standard error: one line that rewrites itself on a terminal, plain lines elsewhere.

A thread of its own prints: a terminal that does not keep up must not hold the event loop that takes the timestamps. The
line is plain text rather than a rich display, whose layout would hold the interpreter for milliseconds.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final, TextIO

from atom.bench.runner import Progress

__all__ = ["LoadProgress", "progress_line"]

TERMINAL_PERIOD_S: Final = 0.25
PLAIN_PERIOD_S: Final = 10.0
BAR_WIDTH: Final = 24


class LoadProgress:
    """Call it with the runner's `Progress` (any thread, returns at once); use it as a context manager."""

    def __init__(self, *, quiet: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._progress: Progress | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atom-progress", daemon=True)

    def __call__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> LoadProgress:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if not self._quiet:
            self._thread.join()
            self._print(last=True)

    def _run(self) -> None:
        next_plain = 0.0
        phase = ""
        while not self._stop.wait(TERMINAL_PERIOD_S):
            progress = self._progress
            if progress is None:
                continue
            if self._terminal:
                self._print()
            elif progress.phase != phase or time.monotonic() >= next_plain:
                phase, next_plain = progress.phase, time.monotonic() + PLAIN_PERIOD_S
                self._print()

    def _print(self, *, last: bool = False) -> None:
        if self._progress is None:
            return
        line = progress_line(self._progress, bar=self._terminal)
        try:
            if self._terminal:
                self._stream.write(f"\r\x1b[2K{line}" + ("\n" if last else ""))
            else:
                self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads it any more


def progress_line(progress: Progress, *, bar: bool) -> str:
    """One line: done/total, tok/s, TTFT, running, errors."""
    if progress.phase in ("preparing", "warmup"):
        return f"{progress.phase} …" + (f" {progress.running} running" if progress.running else "")
    parts = [f"{progress.done:,}/{progress.total:,}"]
    if bar:
        full = round(BAR_WIDTH * progress.done / progress.total) if progress.total else 0
        parts.insert(0, "━" * full + "╌" * (BAR_WIDTH - full))
    if progress.elapsed_s > 0:
        parts.append(f"{progress.output_tokens / progress.elapsed_s:,.0f} tok/s")
    if progress.ttft_ms is not None:
        parts.append(f"TTFT {progress.ttft_ms:,.0f} ms")
    parts.append(f"{progress.running:,} running")
    parts.append(f"{progress.failed:,} errors" + (f" ({progress.first_error[:60]})" if progress.first_error else ""))
    parts.append(f"{progress.elapsed_s:,.0f} s")
    return "  ".join(parts)
