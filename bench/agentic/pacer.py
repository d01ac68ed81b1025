"""When a waiting turn may go: at its time, or earlier together with all others while the whole system is idle."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Pacer"]

_POLL_NS: Final = 50_000_000
"""How often it looks whether the load has closed."""


@dataclass(order=True, slots=True)
class _Waiter:
    wake_ns: int
    number: int
    due_ns: int = field(compare=False)
    future: asyncio.Future[int] = field(compare=False, repr=False)


class Pacer:
    """Holds turns until they are due.

    `due_ns` are times of `now_ns`. When nothing has been under way for `idle_cap_ns`, all that wait move up by the same
    time, so that the next one is due: a trace's quiet hours are shortened, its order and overlaps are kept.
    """

    def __init__(self, now_ns: Callable[[], int], closed: Callable[[], bool], idle_cap_ns: int | None) -> None:
        self._now_ns = now_ns
        self._closed = closed
        self._cap_ns = idle_cap_ns
        self._waiters: list[_Waiter] = []  # a heap; moving all up by one time keeps it one
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._under_way = 0
        self._idle_since_ns = now_ns()
        self.skipped_ns = 0
        """How much later everything would have been due so far without the cap."""
        self.jumps = 0

    async def until(self, due_ns: int, *, lead_ns: int = 0) -> int | None:
        """Wait until `lead_ns` before `due_ns`, and return when it is due, moved up as it may be by then. None: the
        load has closed meanwhile."""
        if self._closed():
            return None
        if due_ns - lead_ns <= self._now_ns():
            return due_ns
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, _Waiter(due_ns - lead_ns, next(self._numbers), due_ns, future))
        self._changed.set()
        due_ns = await future
        return None if self._closed() else due_ns

    def begin(self) -> None:
        """A request is under way."""
        self._under_way += 1

    def end(self) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self._idle_since_ns = self._now_ns()
            self._changed.set()

    async def run(self) -> None:
        """Lets waiters go; to be cancelled when none are left."""
        while True:
            self._changed.clear()
            if self._under_way == 0 and self._cap_ns is not None:
                self._move_up(self._cap_ns)
            now, closed = self._now_ns(), self._closed()
            while self._waiters and (closed or self._waiters[0].wake_ns <= now):
                waiter = heapq.heappop(self._waiters)
                if not waiter.future.done():  # else its task was cancelled
                    waiter.future.set_result(waiter.due_ns)
            wait = min(_POLL_NS, self._waiters[0].wake_ns - now) if self._waiters else _POLL_NS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait / 1e9):
                    await self._changed.wait()

    def _move_up(self, cap_ns: int) -> None:
        due = [waiter.due_ns for waiter in self._waiters if not waiter.future.done()]
        skip = min(due, default=0) - (self._idle_since_ns + cap_ns)
        if skip > 0:
            for waiter in self._waiters:
                waiter.due_ns -= skip
                waiter.wake_ns -= skip
            self.skipped_ns += skip
            self.jumps += 1
