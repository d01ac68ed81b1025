"""What `gc.callbacks` calls: it notes each collection in a queue, without running any Python code.

CPython runs pending signal handlers in the main thread when a Python function begins. If such a function is a callback
of the collector, whatever the handler raises (`KeyboardInterrupt`, the `SystemExit` of a server's SIGTERM) is printed
as ignored, and the server never ends. So the callbacks are made of C alone: no frame, nothing that can be interrupted.
It costs no more than a Python function did: 1.0 against 1.1 microseconds per collection (CPython 3.11).

How: a callback is `partial(setattr, thing)`, so that the collector's call of `callback("stop", info)` is
`thing.stop = info`, and `stop` is a property whose setter is a function written in C. For `_Infos`, a deque, that is
`deque.append`: it keeps `info`. For `_Times`, an iterator, that is `next(thing, info)`: it takes one step, which puts
number, time, thread and number again into the same deque. `start` does the same but keeps no `info`.
"""

# Python 3.8 has no `zip(strict=)`.
# ruff: noqa: B905

from __future__ import annotations

import _thread
import gc
import operator
import time
from collections import deque
from functools import partial
from itertools import count, repeat, starmap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["PassQueue"]

CAPACITY = 16384
"""Passes that fit: minutes, if the drain thread hangs in a write; at most 10 MB then."""
_ITEMS = 9
"""Of one pass: number, start, thread, number; info; number, stop, thread, number."""


class _Infos(deque):  # type: ignore[type-arg]  # Python 3.8 cannot subscript it
    start = property(None, operator.is_)  # type: ignore[arg-type]  # does nothing
    stop = property(None, deque.append)


class _Times(map):  # type: ignore[type-arg]
    start = property(None, next)
    stop = property(None, next)


class PassQueue:
    """Collections of this process since `install`, until somebody takes them. Many threads put in, one takes out."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.infos = _Infos(maxlen=capacity * _ITEMS)
        threads, times = starmap(_thread.get_ident, repeat(())), starmap(time.monotonic_ns, repeat(()))
        # `zip` makes no new tuple for each step: `extend` lets go of the last.
        steps: Any = _Times(self.infos.extend, zip(count(), times, threads, count()))
        self.callbacks = [partial(setattr, self.infos), partial(setattr, steps)]
        self.lost = 0
        """Passes that found the queue full."""
        self._rest: list[Any] = []
        self._next = 0

    def install(self) -> None:
        gc.callbacks.extend(self.callbacks)

    @property
    def installed(self) -> bool:
        return all(callback in gc.callbacks for callback in self.callbacks)

    def remove(self) -> None:
        for callback in self.callbacks:
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

    @property
    def waiting(self) -> bool:
        return len(self.infos) >= _ITEMS

    def take(self) -> list[tuple[int, int, int, dict[str, int]]]:
        """All passes that have ended: start, stop (nanoseconds of CLOCK_MONOTONIC), thread, `info` of the collector.

        A pass without its start (the hook came while it ran), or torn because the queue was full and its beginning fell
        out, is left out: only the numbers of one pass are consecutive.
        """
        pop = self.infos.popleft
        items = self._rest + [pop() for _ in range(len(self.infos))]
        whole = len(items) // _ITEMS
        firsts, starts, _, same_firsts, infos, seconds, stops, threads, same_seconds = (
            items[at : whole * _ITEMS : _ITEMS] for at in range(_ITEMS)
        )
        if firsts == same_firsts == list(range(self._next, self._next + 2 * whole, 2)) and (
            seconds == same_seconds == list(range(self._next + 1, self._next + 1 + 2 * whole, 2))
        ):
            self._next += 2 * whole
            self._rest = items[whole * _ITEMS :]
            return list(zip(starts, stops, threads, infos))
        return self._sort_out(items)

    def _sort_out(self, items: list[Any]) -> list[tuple[int, int, int, dict[str, int]]]:
        """The whole passes among these; what is torn is passed over one item at a time."""
        taken, at = [], 0
        while len(items) - at >= _ITEMS:
            first, start, _, same_first, info, second, stop, thread, same_second = items[at : at + _ITEMS]
            if first == same_first and second == same_second == first + 1 and type(info) is dict:
                taken.append((start, stop, thread, info))
                # The first step of all may be the end of a pass that began before: one step, which is no loss.
                self.lost += (first - self._next) // 2
                self._next = second + 1
                at += _ITEMS
            else:
                at += 1
        self._rest = items[at:]
        return taken
