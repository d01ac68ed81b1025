"""Live progress on standard error: one line that rewrites itself on a terminal, plain lines elsewhere. First of a
starting server, then of the load, on the same line: nothing else may draw on that terminal meanwhile.

A thread of its own prints: a terminal that does not keep up must not hold the event loop that takes the timestamps. The
line is plain text rather than a rich display, whose layout would hold the interpreter for milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from rich.cells import cell_len, set_cell_size

from atom.bench.runner import Progress
from atom.recipes.launcher import LaunchProgress

__all__ = ["PLAIN_PERIOD_S", "LoadProgress", "StatusLine", "launch_progress", "progress_line"]

TERMINAL_PERIOD_S: Final = 0.25
PLAIN_PERIOD_S: Final = 10.0
BAR_WIDTH: Final = 24
MIN_BAR_WIDTH: Final = 8


class StatusLine:
    """One line of a stream. On a terminal `show` replaces it, cut to the terminal's width, for a line that wraps cannot
    be taken back; elsewhere every `show` is a line of its own. A stream that nobody reads is no error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.terminal = stream.isatty()
        self._open = False

    @property
    def width(self) -> int | None:
        """Columns that can be used, the last one not (writing there may wrap); None: no terminal, no limit."""
        if not self.terminal:
            return None
        try:
            return max(10, os.get_terminal_size(self._stream.fileno()).columns - 1)
        except (OSError, ValueError):
            return 79

    def show(self, text: str) -> None:
        """Text from a server may be in it: nothing of it moves the cursor."""
        text = "".join(character if character.isprintable() else " " for character in text)
        width = self.width
        if width is None:
            self._write(text + "\n")
            return
        self._write("\r\x1b[2K" + (text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"))
        self._open = True

    def keep(self) -> None:
        """Leave the line where it is and go to the next one."""
        if self._open:
            self._write("\n")
        self._open = False

    def clear(self) -> None:
        if self._open:
            self._write("\r\x1b[2K")
        self._open = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


@contextmanager
def launch_progress(line: StatusLine, *, quiet: bool) -> Iterator[Callable[[LaunchProgress], None] | None]:
    """Shows what a starting server is waited for: on a terminal at most four times a second, elsewhere every ten
    seconds. The load's progress takes the line over."""
    if quiet:
        yield None
        return
    period = TERMINAL_PERIOD_S if line.terminal else PLAIN_PERIOD_S
    last = -period

    def show(progress: LaunchProgress) -> None:
        nonlocal last
        if progress.elapsed_s - last >= period:
            last = progress.elapsed_s
            line.show(f"server starting: {progress.elapsed_s:.0f} s, waiting for {progress.waiting_for}")

    try:
        yield show
    finally:
        line.clear()


class LoadProgress:
    """Call it with the runner's `Progress` (any thread, returns at once); use it as a context manager."""

    def __init__(self, line: StatusLine, *, quiet: bool, plain_period_s: float = PLAIN_PERIOD_S) -> None:
        self._line = line
        self._quiet = quiet
        self._plain_period_s = plain_period_s
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
            self._print()
            self._line.keep()

    def _run(self) -> None:
        next_plain = 0.0
        phase = ""
        while not self._stop.wait(TERMINAL_PERIOD_S):
            progress = self._progress
            if progress is None:
                continue
            if self._line.terminal:
                self._print()
            elif progress.phase != phase or time.monotonic() >= next_plain:
                phase, next_plain = progress.phase, time.monotonic() + self._plain_period_s
                self._print()

    def _print(self) -> None:
        if self._progress is not None:
            self._line.show(progress_line(self._progress, bar=self._line.terminal, width=self._line.width))


def progress_line(progress: Progress, *, bar: bool, width: int | None = None) -> str:
    """One line: done/total, tok/s, TTFT, running, cancelled, errors. The bar takes what `width` leaves, if enough."""
    if progress.phase in ("preparing", "warmup"):
        return f"{progress.phase} …" + (f" {progress.running} running" if progress.running else "")
    parts = [f"{progress.done:,}" if progress.total is None else f"{progress.done:,}/{progress.total:,}"]
    if progress.elapsed_s > 0:
        parts.append(f"{progress.output_tokens / progress.elapsed_s:,.0f} tok/s")
    if progress.ttft_ms is not None:
        parts.append(f"TTFT {progress.ttft_ms:,.0f} ms")
    parts.append(f"{progress.running:,} running")
    if progress.cancelled:
        parts.append(f"{progress.cancelled:,} cancelled")
    parts.append(f"{progress.failed:,} errors" + (f" ({progress.first_error[:60]})" if progress.first_error else ""))
    parts.append(f"{progress.elapsed_s:,.0f} s")
    text = "  ".join(parts)
    room = BAR_WIDTH if width is None else min(BAR_WIDTH, width - cell_len(text) - 2)
    if not bar or room < MIN_BAR_WIDTH:
        return text
    full = round(room * progress.done / progress.total) if progress.total else 0
    return "━" * full + "╌" * (room - full) + "  " + text
