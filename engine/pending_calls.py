"""Utility calls to a core that wait for their answer, each as a future by call id."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

from atom.engine.errors import AtomEngineError
from atom.engine.messages import UtilityResult


class PendingCalls:
    """`open` and `close` on the caller's thread, `resolve` and `fail_all` on the output thread."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def open(self) -> tuple[int, Future[Any]]:
        call_id = next(self._ids)
        future: Future[Any] = Future()
        self._futures[call_id] = future
        return call_id, future

    def close(self, call_id: int) -> None:
        """The caller has its answer, or gave up."""
        self._futures.pop(call_id, None)

    def resolve(self, result: UtilityResult) -> None:
        future = self._futures.pop(result.call_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return  # the caller gave up
        if result.error is None:
            future.set_result(result.value)
        else:
            future.set_exception(AtomEngineError(result.error))

    def fail_all(self, error: Exception) -> None:
        for call_id in list(self._futures):
            future = self._futures.pop(call_id, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)
