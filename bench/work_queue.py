"""Work that the event loop does when no socket is waiting: the parsing of what was read, and records to write."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Final, Protocol

__all__ = ["BACKLOG_BYTES", "WorkQueue"]

SLICE_NS: Final = 200_000
"""Longest stretch of deferred work between two looks at the sockets."""
BACKLOG_BYTES: Final = 16 << 20
"""Unparsed bytes above which parsing goes before reading, so that memory stays bounded."""
MAX_LATER: Final = 64
"""What is put off beyond this many is done although a load that never lets up leaves no time for it."""


class Parses(Protocol):
    """Holds bytes that were read and not parsed yet."""

    def parse(self) -> None: ...


class WorkQueue:
    """Parsing first, then what was put off with `later`; in slices, so that reading never waits long."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_error: Callable[[Exception], None]) -> None:
        """`on_error` is told of an exception in the work; the work after it goes on."""
        self._loop = loop
        self.on_error = on_error
        self._parse: deque[Parses] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self.backlog = 0
        """Bytes read and not parsed yet."""
        self.max_backlog = 0

    def parse(self, connection: Parses) -> None:
        self._parse.append(connection)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._slice)

    def later(self, work: Callable[[], None]) -> None:
        self._later.append(work)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._slice)

    def drain(self) -> None:
        """Do all of it now."""
        while self._parse:
            self._do(self._parse.popleft().parse)
        while self._later:
            self._do(self._later.popleft())

    def _slice(self) -> None:
        end = monotonic_ns() + SLICE_NS
        self.max_backlog = max(self.max_backlog, self.backlog)
        while self._parse:
            self._do(self._parse.popleft().parse)
            if monotonic_ns() >= end and self.backlog < BACKLOG_BYTES:
                break
        while self._later and (len(self._later) > MAX_LATER or monotonic_ns() < end):
            self._do(self._later.popleft())
        if self._parse or self._later:
            self._loop.call_soon(self._slice)
        else:
            self._scheduled = False

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.on_error(error)
