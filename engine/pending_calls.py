"""Utility calls to cores that wait for their answers, each as a future by call id. What can be called:
`EngineCore.call`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from atom.engine.errors import AtomEngineError
from atom.engine.messages import UtilityCall, UtilityResult


class PendingCalls:
    """`wait` on any thread, `wait_async` on any loop, `resolve` and `fail_all` on the output thread."""

    def __init__(self, send: Callable[[int, UtilityCall], None]) -> None:
        """`send(engine_index, call)`: raises when no answer can come."""
        self._send = send
        self._ids = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def wait(self, method: str, args: dict[str, Any], timeout: float, engine_indexes: Sequence[int]) -> list[Any]:
        """Call `method` on these cores and return their values, in order. Raises `TimeoutError` when not all have
        answered after `timeout` seconds, `AtomEngineError` with a core's refusal, and what `send` raises."""
        deadline = time.monotonic() + timeout
        with self._opened(method, args, engine_indexes) as futures:
            try:
                return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
            except TimeoutError:
                raise _no_answer(method, timeout) from None

    async def wait_async(
        self, method: str, args: dict[str, Any], timeout: float, engine_indexes: Sequence[int]
    ) -> list[Any]:
        """`wait` for an event loop."""
        with self._opened(method, args, engine_indexes) as futures:
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.gather(*map(asyncio.wrap_future, futures))
            except TimeoutError:
                raise _no_answer(method, timeout) from None

    @contextlib.contextmanager
    def _opened(self, method: str, args: dict[str, Any], engine_indexes: Sequence[int]) -> Iterator[list[Future[Any]]]:
        """The answers as futures, until the caller has them or gives up."""
        call_ids = []
        futures = []
        try:
            for engine_index in engine_indexes:
                call_id = next(self._ids)
                call_ids.append(call_id)
                futures.append(self._futures.setdefault(call_id, Future()))
                self._send(engine_index, UtilityCall(call_id, method, args))
            yield futures
        finally:
            for call_id in call_ids:
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


def _no_answer(method: str, timeout: float) -> TimeoutError:
    return TimeoutError(f"the engine did not answer {method!r} within {timeout:g} s")
