"""A server's log on disk: bounded, written a line at a time, and never a reason for the server to stop.

Standard library only (the supervisor imports it). Following a log and explaining its errors is `recipes/hints.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["BoundedLog", "LineSplitter"]

MAX_LINE_BYTES: Final = 64 * 1024


class LineSplitter:
    """Cuts a byte stream into lines ended by LF, CR or CRLF. A line longer than 64 KiB is delivered in pieces, so a
    server that never ends its line costs no memory."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Complete lines, without their ends. A progress bar's carriage returns end lines too."""
        *lines, rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return (line for line in lines if line)

    def flush(self) -> Iterator[bytes]:
        """The unfinished last line, if there is one."""
        rest, self._rest = self._rest, b""
        return iter([rest] if rest else [])


class BoundedLog:
    """Appends to `path`; at half of `max_bytes` the file becomes `path.1` (replacing the one before), so the two never
    hold more than `max_bytes` and the newest half is always there.

    Writing never raises: on a full disk lines are lost and counted in `lost_bytes`.
    """

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self.path = path
        self.lost_bytes = 0
        self.error: str | None = None
        self._limit = max(max_bytes // 2, 1)
        self._size = 0
        self._fd = -1
        if path is not None:
            self._open(path, os.O_APPEND)

    def _open(self, path: Path, how: int) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o644)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            self.error = self.error or f"{path}: {error.strerror}"

    def write(self, line: bytes) -> None:
        """Append one line; its end is added here."""
        if self.path is None:
            return
        data = line + b"\n"
        if self._size + len(data) > self._limit and self._size:
            self._rotate(self.path)
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            written = 0
            self.error = self.error or f"{self.path}: {error.strerror}"
        self._size += written
        self.lost_bytes += len(data) - written

    def _rotate(self, path: Path) -> None:
        if not path.is_file():  # a device such as /dev/null is never renamed
            self._size = 0
            return
        self.close()
        with contextlib.suppress(OSError):
            path.replace(f"{path}.1")
        self._open(path, os.O_TRUNC)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
