"""One push by NIXL: read the receiver's marks, write chunk after chunk, say that it is complete."""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np

from atom.engine.transfer.data_messages import Description, Message
from atom.engine.transfer.pool_layout import Segment, chunks
from atom.engine.transfer.push_state import Plan

__all__ = ["NixlJob"]

_WINDOW: Final = 2
"""Chunks under way at once: the next is posted before the last has ended."""


class _Link(Protocol):
    name: str
    lost: str | None

    def send(self, message: Message) -> None: ...

    def lose(self, reason: str) -> None: ...


class _Scratch(Protocol):
    words: Any
    address: int
    owner: object | None


class NixlJob:
    """A `push_state.Job`. Everything happens in `advance`."""

    def __init__(
        self,
        agent: Any,
        link: _Link,
        plan: Plan,
        base_address: int,
        remote: Description,
        scratch: _Scratch,
        *,
        max_bytes: int,
        max_segments: int,
    ) -> None:
        self.complete = False
        self.quiescent = False
        self.error: str | None = None
        self._agent = agent
        self._link = link
        self._plan = plan
        self._base = base_address
        self._remote = remote
        self._scratch = scratch
        self._stopped = False
        self._marks_read: Any = None
        self._allowed = False
        self._exhausted = False
        self._under_way: list[Any] = []
        self._chunks = chunks(
            plan.slices, plan.source_blocks, plan.destination_blocks, max_bytes=max_bytes, max_segments=max_segments
        )

    def stop(self) -> None:
        self._stopped = True
        self._settle()

    def advance(self) -> None:
        if self.quiescent:
            return
        try:
            self._step()
        except Exception as error:  # the binding's exceptions have no root of their own
            self._fail(f"NIXL: {error}")
            if "Disconnect" in type(error).__name__:
                self._link.lose(f"the other rank is gone: {error}")
        self._settle()

    def _step(self) -> None:
        if not self._allowed and not self._ended:
            self._read_marks()
        self._drain()
        while self._allowed and not self._ended and not self._exhausted and len(self._under_way) < _WINDOW:
            chunk = next(self._chunks, None)
            if chunk is None:
                self._exhausted = True
            else:
                self._under_way.append(self._post("WRITE", chunk))
        if self._exhausted and not self._under_way and not self._ended:
            self._link.send(self._plan.completion)
            if self._link.lost is None:
                self.complete = True
            else:
                self._fail(self._link.lost)

    @property
    def _ended(self) -> bool:
        return self._stopped or self.error is not None

    def _read_marks(self) -> None:
        """Whether the receiver expects this round in all of the blocks. One job of a link at a time."""
        scratch, blocks = self._scratch, np.asarray(self._plan.destination_blocks)
        first, count = int(blocks.min()), int(blocks.max() - blocks.min()) + 1
        if self._marks_read is None:
            if scratch.owner is not None:
                return
            scratch.owner = self
            self._marks_read = self._transfer(
                "READ",
                [(scratch.address, 8 * count, 0)],
                [(self._remote.base_address + self._remote.marks_offset + 8 * first, 8 * count, 0)],
            )
        if not self._is_over(self._marks_read):
            return
        self._let_go_of_marks()
        if not (scratch.words[blocks - first] == np.uint64(self._plan.tag)).all():
            self._fail("the receiver does not expect this round in these blocks (any more)")
        self._allowed = True

    def _post(self, operation: str, chunk: list[Segment]) -> Any:
        local = [(self._base + segment.source, segment.length, 0) for segment in chunk]
        remote = [(self._remote.base_address + segment.destination, segment.length, 0) for segment in chunk]
        return self._transfer(operation, local, remote)

    def _transfer(self, operation: str, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]]) -> Any:
        agent = self._agent
        handle = agent.initialize_xfer(
            operation, agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), self._link.name
        )
        agent.transfer(handle)  # what it says is asked again below
        return handle

    def _is_over(self, handle: Any) -> bool:
        """Whether a transfer has ended; of one that ended badly the job fails."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            self._fail(f"NIXL: {error}")
            self._link.lose(f"the other rank cannot be reached: {error}")
            return True
        if state == "ERR":
            self._fail("NIXL reports that a transfer failed")
        return bool(state != "PROC")

    def _drain(self) -> None:
        still = []
        for handle in self._under_way:
            if self._is_over(handle):
                self._agent.release_xfer_handle(handle)
            else:
                still.append(handle)
        self._under_way = still

    def _let_go_of_marks(self) -> None:
        self._agent.release_xfer_handle(self._marks_read)
        self._marks_read = None
        self._scratch.owner = None

    def _settle(self) -> None:
        if self.complete:
            self.quiescent = True
        elif self._ended:
            if self._marks_read is not None and self._is_over(self._marks_read):
                self._let_go_of_marks()
            self.quiescent = not self._under_way and self._marks_read is None

    def _fail(self, reason: str) -> None:
        if self.error is None:
            self.error = reason
