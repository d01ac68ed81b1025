"""Copies between two pools mapped in this process, in a thread: a context rank polls once per step, and bytes should
not wait for that. Jobs take turns chunk by chunk, so that a long one does not hold up short ones.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from atom.engine.transfer.pool_layout import Segment, chunks
from atom.engine.transfer.push_state import Plan
from atom.engine.transfer.shared_pool import RemotePool

__all__ = ["CopyJob", "CopyWorker"]

_HELD_BYTES: Final = 64 << 10
"""Below this a copy takes a few µs, and giving the interpreter lock away costs up to the 5 ms until one has it back."""

_move_held = ctypes.PyDLL(None).memmove
_move_held.restype = None
_move_held.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_free = ctypes.CDLL(None).memmove
_move_free.restype = None
_move_free.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class CopyJob:
    """A `push_state.Job`. The worker's thread alone copies and says that it is complete."""

    def __init__(
        self,
        plan: Plan,
        source_address: int,
        remote: RemotePool,
        announce: Callable[[], None],
        *,
        max_bytes: int,
        max_segments: int,
    ) -> None:
        """`announce`: tells the receiver; called in the worker's thread."""
        self.complete = False
        self.quiescent = False
        self.error: str | None = None
        self._tag = np.uint64(plan.tag)
        self._blocks = np.asarray(plan.destination_blocks, dtype=np.int64)
        self._chunks = chunks(
            plan.slices, plan.source_blocks, plan.destination_blocks, max_bytes=max_bytes, max_segments=max_segments
        )
        self._source = source_address
        self._remote = remote
        self._announce = announce
        self._lock = threading.Lock()
        self._stopped = False

    def advance(self) -> None:
        """The worker does."""

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def step(self) -> bool:
        """Copy a chunk; False when there is no further one."""
        try:
            more = not self._stopped and self._copy_next()
        except Exception as error:
            self.error, more = f"the copy failed: {error!r}", False
        if not more:
            self._end()
        return more

    def _copy_next(self) -> bool:
        # Looked at before every chunk and after the last: what is revoked on the way is not said to be complete.
        if not (self._remote.marks[self._blocks] == self._tag).all():
            self.error = "the receiver does not expect this round in these blocks (any more)"
            return False
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        self._copy(chunk)
        return True

    def _copy(self, chunk: list[Segment]) -> None:
        to, source = self._remote.address, self._source
        for start, destination, length in chunk:
            move = _move_held if length <= _HELD_BYTES else _move_free
            move(to + destination, source + start, length)

    def _end(self) -> None:
        with self._lock:
            if not self._stopped and self.error is None:
                self._announce()
                self.complete = True
            self.quiescent = True


class CopyWorker:
    """The thread. Starts with the first job."""

    def __init__(self) -> None:
        self._jobs: deque[CopyJob] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, job: CopyJob) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="atom-kv-copy", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, deadline_s: float) -> None:
        """Jobs should have ended; those that have not are stopped."""
        with self._changed:
            self._closing = True
            for job in self._jobs:
                job.stop()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            if job.step():
                with self._changed:
                    if self._closing:
                        job.stop()
                    self._jobs.append(job)
            del job  # or the last one's pool stays mapped while there is nothing to do
